"""Plain values as JSON and back: what stands in a state_dict beside tensors. No pickle.

JSON has fewer kinds of values than Python; what it lacks is written as an object with the key `~`.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from stoker.errors import UsageError, require

_TAG = "~"
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


def decode(plain: Any) -> Any:
    """The value behind its JSON form."""
    if isinstance(plain, list):
        return [decode(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if _TAG not in plain:
        return {key: decode(value) for key, value in plain.items()}
    return _READERS[plain[_TAG]](plain)


def _encode_mapping(value: Mapping[Any, Any], name: str) -> Any:
    if all(type(key) is str for key in value) and _TAG not in value:
        return {key: encode(one, name=f"{name}.{key}") for key, one in value.items()}
    pairs = [[encode(key, name=name), encode(one, name=f"{name}.{key}")] for key, one in value.items()]
    return {_TAG: "dict", "v": pairs}


def _encode_many(kind: str) -> Any:
    def write(value: Any, name: str) -> Any:
        return {_TAG: kind, "v": [encode(one, name=f"{name}[{at}]") for at, one in enumerate(value)]}

    return write


def _encode_list(value: list[Any], name: str) -> Any:
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


def _encode_bytes(value: bytes, name: str) -> Any:
    return {_TAG: "bytes", "v": base64.b64encode(value).decode()}


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
    data = np.frombuffer(base64.b64decode(plain["v"]), np.dtype(plain["dtype"]))
    array = data.reshape(plain["shape"]).copy()
    return array if plain["shape"] else array[()]


_READERS: dict[str, Any] = {
    "dict": lambda plain: {_hashable(decode(key)): decode(value) for key, value in plain["v"]},
    "tuple": lambda plain: tuple(map(decode, plain["v"])),
    "set": lambda plain: {_hashable(decode(one)) for one in plain["v"]},
    "frozenset": lambda plain: frozenset(_hashable(decode(one)) for one in plain["v"]),
    "bytes": lambda plain: base64.b64decode(plain["v"]),
    "array": _decode_array,
    "dtype": lambda plain: getattr(require("torch", extra="torch"), plain["v"]),
    "device": lambda plain: require("torch", extra="torch").device(plain["v"]),
}


def _hashable(key: Any) -> Any:
    """What stands in a set or as a key; checkpoints of before wrote frozensets as sets."""
    if isinstance(key, (list, tuple)):
        return tuple(map(_hashable, key))
    return frozenset(key) if isinstance(key, set) else key
