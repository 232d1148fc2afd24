"""Serialisation: plain values beside the tensors of a state_dict, as JSON and back. No pickle.

JSON has fewer kinds of values than Python; what it lacks is written as an object with the key `~`.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from stoker.errors import BadCheckpointError, UsageError, require

_TAG = "~"
_FACTORIES = {"int": int, "float": float, "list": list, "dict": dict, "set": set, "str": str, "None": None}
_ARRAY_KINDS = "biufcmMSU"  # whose dtype is all in its short name, and whose bytes are all there is


def encode(value: Any, *, name: str) -> Any:  # anything in a state_dict; what JSON can hold
    """The JSON form of a value; `name` is where it stands, for the error."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return _encode_mapping(value, name)
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value, name)
    torch_word = _torch_word(value)
    if torch_word:
        return torch_word
    raise UsageError(
        f"{name} is a {type(value).__module__}.{type(value).__name__}, which a checkpoint cannot hold",
        hint="give tensors, numbers, text, bytes, numpy arrays, lists or dictionaries of them",
    )


def encoded(values: Mapping[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    """Values by path, in their JSON form."""
    found = []
    for path, value in values.items():
        name = ".".join(map(str, path))
        with unnested(name):
            found.append((path, encode(value, name=name)))
    return tuple(found)


@contextmanager
def unnested(name: str) -> Iterator[None]:
    """Say by its name what is nested without end."""
    try:
        yield
    except RecursionError:
        raise UsageError(
            f"{name} holds itself, or is nested hundreds of levels deep, which a checkpoint cannot hold",
            hint="save what it is made of by names of its own",
        ) from None


def decode(plain: Any) -> Any:
    """The value behind its JSON form; what is none of ours is refused."""
    try:
        return _decode(plain)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise BadCheckpointError(
            f"a value cannot be read: {str(plain)[:80]} ({type(error).__name__}: {error})",
            hint="a newer stoker may have written it, or somebody else",
        ) from error


def _decode(plain: Any) -> Any:
    if isinstance(plain, list):
        return [_decode(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {key: _decode(value) for key, value in plain.items()}
    return _READERS[plain[_TAG]](plain)


def is_kept_mapping(value: Any) -> bool:
    """Whether a mapping is to come back as what it is: a Counter read as a dict fails at its next missing
    key. An OrderedDict is not among them at the top of a state: every state_dict is one."""
    return isinstance(value, (Counter, defaultdict))


def _encode_mapping(value: Mapping[Any, Any], name: str) -> Any:
    kind = _mapping_kind(value, name)
    if kind == {_TAG: "dict"} and all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(one, name=f"{name}.{key}") for key, one in value.items()}
    pairs = [[encode(key, name=name), encode(one, name=f"{name}.{key}")] for key, one in value.items()]
    return {**kind, "v": pairs}


def _mapping_kind(value: Mapping[Any, Any], name: str) -> dict[str, str]:
    if isinstance(value, defaultdict):
        known = {made: word for word, made in _FACTORIES.items()}
        if value.default_factory not in known:
            raise UsageError(
                f"{name} is a defaultdict whose default is {value.default_factory!r}, which a checkpoint "
                "cannot hold",
                hint=f"use one of {', '.join(_FACTORIES)}, or give dict(...) of it",
            )
        return {_TAG: "defaultdict", "of": known[value.default_factory]}
    kinds = ((Counter, "counter"), (OrderedDict, "ordered"))
    return {_TAG: next((word for kind, word in kinds if isinstance(value, kind)), "dict")}


def _encode_many(kind: str) -> Any:
    def write(value: Any, name: str) -> Any:
        return {_TAG: kind, "v": [encode(one, name=f"{name}[{at}]") for at, one in enumerate(value)]}

    return write


def _encode_list(value: list[Any], name: str) -> Any:
    if all(type(one) in (str, int) for one in value):  # an optimizer has a name for every parameter
        return list(value)
    return [encode(one, name=f"{name}[{at}]") for at, one in enumerate(value)]


def _encode_array(value: Any, name: str) -> Any:
    array = np.asarray(value)
    masked = isinstance(value, np.ma.MaskedArray)
    if masked or array.dtype.kind not in _ARRAY_KINDS:
        kind = "a masked array" if masked else f"an array of {_kind_name(array.dtype)}"
        raise UsageError(
            f"{name} is {kind}, which a checkpoint cannot hold",
            hint="give arrays of numbers; of others give the parts, each as an array of its own",
        )
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_TAG: "array", "dtype": array.dtype.str, "shape": list(array.shape), "v": data}


def _kind_name(dtype: np.dtype[Any]) -> str:
    return "Python objects" if dtype.hasobject else "records" if dtype.names else str(dtype)


def _encode_bytes(value: bytes | bytearray, name: str) -> Any:
    kind = "bytearray" if isinstance(value, bytearray) else "bytes"
    return {_TAG: kind, "v": base64.b64encode(value).decode()}


def _torch_word(value: Any) -> Any:
    """torch.float32, torch.device("cpu"): by their names, so that torch need not be here."""
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return {_TAG: type(value).__name__, "v": str(value).removeprefix("torch.")}
    return None


# bool, int, float and str here are subclasses (an IntEnum, a numpy float): they become what they are
_WRITERS: tuple[tuple[Any, Any], ...] = (
    (list, _encode_list),
    (tuple, _encode_many("tuple")),
    (set, _encode_many("set")),
    (frozenset, _encode_many("frozenset")),
    ((bytes, bytearray), _encode_bytes),
    ((np.ndarray, np.generic), _encode_array),
    (int, lambda value, name: int(value)),
    (float, lambda value, name: float(value)),
    (str, lambda value, name: str.__str__(value)),
)


def _decode_array(plain: dict[str, Any]) -> Any:
    dtype = np.dtype(plain["dtype"])
    if dtype.kind not in _ARRAY_KINDS:
        raise ValueError(f"an array of {dtype}")
    data = np.frombuffer(base64.b64decode(plain["v"]), dtype)
    array = data.reshape(plain["shape"]).copy()
    return array if plain["shape"] else array[()]


def _pairs(plain: dict[str, Any]) -> dict[Any, Any]:
    return {_hashable(_decode(key)): _decode(value) for key, value in plain["v"]}


_READERS: dict[str, Any] = {
    "dict": _pairs,
    "counter": lambda plain: Counter(_pairs(plain)),
    "ordered": lambda plain: OrderedDict(_pairs(plain)),
    "defaultdict": lambda plain: defaultdict(_FACTORIES[plain["of"]], _pairs(plain)),
    "tuple": lambda plain: tuple(map(_decode, plain["v"])),
    "set": lambda plain: {_hashable(_decode(one)) for one in plain["v"]},
    "frozenset": lambda plain: frozenset(_hashable(_decode(one)) for one in plain["v"]),
    "bytes": lambda plain: base64.b64decode(plain["v"]),
    "bytearray": lambda plain: bytearray(base64.b64decode(plain["v"])),
    "array": _decode_array,
    "dtype": lambda plain: _dtype(plain["v"]),
    "device": lambda plain: require("torch", extra="torch").device(plain["v"]),
}


def _dtype(name: str) -> Any:
    torch = require("torch", extra="torch")
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return found


def _hashable(key: Any) -> Any:
    """What stands in a set or as a key; checkpoints of before wrote frozensets as sets."""
    if isinstance(key, (list, tuple)):
        return tuple(map(_hashable, key))
    return frozenset(key) if isinstance(key, set) else key
