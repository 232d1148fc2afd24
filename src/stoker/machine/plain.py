"""Record serialisation: plain values and back, by field types; what is missing comes back as Unknown."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

Record = TypeVar("Record")

_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)  # of a class; slow, and asked for every card


@dataclass(frozen=True, kw_only=True, slots=True)
class Unknown:
    """What could not be read, and why."""

    reason: str


NOT_READ = Unknown(reason="not in this recording")


def unread(kind: type[Record], reason: str) -> Record:
    """A record of which nothing could be read."""
    return kind(**{one.name: Unknown(reason=reason) for one in fields(kind)})  # type: ignore[arg-type]


def as_plain(value: Any) -> Any:  # any of the values a record may hold
    """JSON's own types; an Unknown is {"unknown": reason}, and what was never read is left out."""
    if isinstance(value, Unknown):
        return {"unknown": value.reason}
    if is_dataclass(value):
        held = {one.name: getattr(value, one.name) for one in fields(value)}
        return {name: as_plain(item) for name, item in held.items() if item != NOT_READ}
    if isinstance(value, Mapping):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [as_plain(item) for item in value]
    return value


def from_plain(kind: type[Record], plain: Mapping[str, Any]) -> Record:
    """The record; fields that are not given keep their defaults, names that it does not know are left out.

    Raises ValueError where a value is of another type than its field.
    """
    hints = _hints(kind)
    given = {name: _value(hint, plain[name], name) for name, hint in hints.items() if name in plain}
    try:
        return kind(**given)
    except TypeError as error:  # a field without a default
        raise ValueError(f"{kind.__name__}: {error}") from error


def _value(hint: Any, plain: Any, name: str) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    for kind in sorted(kinds, key=lambda kind: kind is not Unknown):  # a record takes any table for its own
        if _fits(kind, plain):
            return _one(kind, plain, name)
    raise ValueError(f"{name} cannot be {plain!r}")


def _fits(kind: Any, plain: Any) -> bool:
    if kind is Unknown:
        return isinstance(plain, Mapping) and isinstance(plain.get("unknown"), str)
    if kind is type(None):
        return plain is None
    if get_origin(kind) is tuple:
        return isinstance(plain, list)
    if is_dataclass(kind) or get_origin(kind) is Mapping:
        return isinstance(plain, Mapping)
    if kind is float:
        return isinstance(plain, (int, float)) and not isinstance(plain, bool)
    # True is an int to Python, and no number to us
    return isinstance(plain, kind) and isinstance(plain, bool) == (kind is bool)


def _one(kind: Any, plain: Any, name: str) -> Any:
    if kind is Unknown:
        return Unknown(reason=plain["unknown"])
    if get_origin(kind) is tuple:
        return tuple(_value(get_args(kind)[0], item, name) for item in plain)
    if get_origin(kind) is Mapping:
        return {str(key): _value(get_args(kind)[1], item, name) for key, item in plain.items()}
    if is_dataclass(kind) and isinstance(kind, type):
        return from_plain(kind, plain)
    return plain
