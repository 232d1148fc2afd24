"""Options of a public call, written once: a record's fields are its signature, its checks and its help.

    @dataclass(frozen=True, kw_only=True, slots=True)
    class TeaOptions:
        leaf: Annotated[str, "which tea"] = field(kw_only=False)
        sugar: Annotated[int, "lumps of it"] = 0

    class Tea:
        @takes(TeaOptions, of="a tea")
        def __init__(self, options: TeaOptions) -> None: ...

`Tea("assam", sugar=1)` is what type checkers, editors, `help` and the reference then know. To add an option,
add a field. The record's module imports `annotations` from the future: they are read as they are written.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from difflib import get_close_matches
from functools import cache, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from stoker.errors import UsageError

P = ParamSpec("P")
Self = TypeVar("Self")
Record = TypeVar("Record")
Result = TypeVar("Result")


class AsWritten(str):
    """Source text, which stands in a signature as it is."""

    __slots__ = ()
    __repr__ = str.__str__


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One option, as its field says."""

    name: str
    type: str
    why: str
    default: object  # inspect.Parameter.empty where there is none
    positional: bool
    choices: tuple[object, ...]  # where the type is a Literal

    @property
    def parameter(self) -> inspect.Parameter:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD if self.positional else inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=self.default, annotation=AsWritten(self.type))


def takes(
    record: Callable[P, Record], *, of: str, elsewhere: Mapping[str, str] | None = None
) -> Callable[[Callable[[Self, Record], Result]], Callable[Concatenate[Self, P], Result]]:
    """A method that is called with the fields of a record, and gets the record.

    `of` says whose options they are; `elsewhere` what replaces the names that people bring along."""

    def decorate(method: Callable[[Self, Record], Result]) -> Callable[Concatenate[Self, P], Result]:
        @wraps(method)
        def call(self: Self, /, *args: P.args, **kwargs: P.kwargs) -> Result:
            check_options(kwargs, [one.name for one in options], of=of, elsewhere=elsewhere)
            signature.bind(self, *args, **kwargs)  # else the error would name the record's constructor
            return method(self, record(*args, **kwargs))

        options = options_of(record)
        itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.Signature([itself, *(one.parameter for one in options)])
        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = _documented(method.__doc__, options)
        return call

    return decorate


def called_like(
    made: Callable[P, object], record: type
) -> Callable[[Callable[..., Result]], Callable[P, Result]]:
    """A function that hands all it gets to a class whose options are those of `record`."""

    def decorate(function: Callable[..., Result]) -> Callable[P, Result]:
        gives = AsWritten(function.__annotations__["return"])
        signature = inspect.signature(made).replace(return_annotation=gives)
        function.__signature__ = signature  # type: ignore[attr-defined]
        function.__doc__ = _documented(function.__doc__, options_of(record))
        return function

    return decorate


@cache
def options_of(record: Any) -> list[Option]:  # a dataclass
    """The options in a record's fields, those that may stand without their name first."""
    found = [_option(one) for one in fields(record)]
    return sorted(found, key=lambda one: not one.positional)


def given(record: object, kind: type) -> dict[str, Any]:
    """The values of a record as keyword arguments of what takes `kind`."""
    return {one.name: getattr(record, one.name) for one in fields(kind)}


def check_choices(record: Any) -> None:  # a dataclass
    """Refuse a value that the field's Literal does not list."""
    kind: Any = type(record)
    for one in options_of(kind):
        value = getattr(record, one.name)
        if one.choices and value not in one.choices:
            allowed = ", ".join(map(repr, one.choices))
            raise UsageError(f"{one.name}={value!r} is unknown", hint=f"use one of {allowed}")


def check_options(
    given: Iterable[str], known: Collection[str], *, of: str, elsewhere: Mapping[str, str] | None = None
) -> None:
    """Refuse options that nobody knows."""
    for name in sorted(set(given) - set(known)):
        near = get_close_matches(name, known, n=1)
        hint = (elsewhere or {}).get(name) or (f"did you mean {near[0]}?" if near else "")
        raise UsageError(f"{of} has no option {name!r}", hint=hint or f"it has {', '.join(known)}")


def _option(field: Field[Any]) -> Option:
    wanted, why = _annotated(str(field.type))
    return Option(
        name=field.name,
        type=ast.unparse(wanted),
        why=why,
        default=_default(field),
        positional=not field.kw_only,
        choices=_choices(wanted),
    )


def _annotated(annotation: str) -> tuple[ast.expr, str]:
    """The type and the reason in `Annotated[type, "why"]`."""
    written = ast.parse(annotation, mode="eval").body
    if isinstance(written, ast.Subscript) and ast.unparse(written.value) == "Annotated":
        assert isinstance(written.slice, ast.Tuple)
        wanted, why = written.slice.elts
        return wanted, str(ast.literal_eval(why))
    return written, ""


def _choices(wanted: ast.expr) -> tuple[object, ...]:
    if isinstance(wanted, ast.Subscript) and ast.unparse(wanted.value) == "Literal":
        some = ast.literal_eval(wanted.slice)
        return some if isinstance(some, tuple) else (some,)
    return ()


def _default(field: Field[Any]) -> object:
    if field.default_factory is not MISSING:
        return AsWritten(f"{getattr(field.default_factory, '__qualname__', '...')}()")
    if inspect.isfunction(field.default):
        return AsWritten(field.default.__name__)  # its repr has an address
    return inspect.Parameter.empty if field.default is MISSING else field.default


def _documented(doc: str | None, options: Iterable[Option]) -> str:
    lines = [inspect.cleandoc(doc or ""), "", "Options:"]
    for one in options:
        lines.append(f"    {one.parameter}")
        lines.append(textwrap.fill(one.why, 100, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines).strip()
