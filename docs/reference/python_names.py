"""The page of the public Python names: what their signatures, option records and docstrings say."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass

import stoker
from stoker.checkpoint.options import CheckpointOptions
from stoker.feeder import FeedOptions
from stoker.load.options import LoaderOptions
from stoker.options import Option, options_of
from stoker.stage.cache import CacheOptions

RECORDS = {
    "feed": FeedOptions,
    "Loader": LoaderOptions,
    "Checkpointer": CheckpointOptions,
    "Cache": CacheOptions,
}
SAME_AS = {"Feeder": "feed"}  # whose options they share
# what parts of stoker ask of each other
INSIDE = {"Cache.bring", "Cache.place", "Cache.check_process", "Loader.items", "Loader.makes_on_device"}


def names_page() -> str:
    parts = ["# Python\n\nGenerated from signatures and docstrings by `docs/reference/make.py`.\n"]
    for name in stoker.__all__:
        parts.append(f"\n## stoker.{name}\n\n{''.join(_described(name))}")
    return "".join(parts)


def _described(name: str) -> Iterator[str]:
    found = getattr(stoker, name)
    if isinstance(found, str):
        yield "The version that is installed.\n"
        return
    if name in RECORDS:
        options = options_of(RECORDS[name])
        yield _code(_short_call(f"stoker.{name}", options))
        yield f"{inspect.getdoc(sys.modules[found.__module__])}\n\n{_own_text(found)}\n\n{_table(options)}"
    elif name in SAME_AS:
        yield f"{_own_text(found)}\n\nIts options are those of `stoker.{SAME_AS[name]}`.\n"
    elif is_dataclass(found):
        yield f"{_own_text(found)}\n\n{_table(options_of(found))}"
    elif isinstance(found, type):
        yield f"{_own_text(found)}\n\n```text\n{inspect.getdoc(sys.modules[found.__module__])}\n```\n"
    else:
        yield _code(f"stoker.{name}{_signature(found)}")
        yield f"{_own_text(found)}\n"
    if isinstance(found, type) and (members := list(_members(name, found))):
        yield from ("\n", *members)


def _members(name: str, kind: type) -> Iterator[str]:
    for member, value in vars(kind).items():
        if member.startswith("_") or f"{name}.{member}" in INSIDE:
            continue
        function = getattr(value, "__func__", value)
        if isinstance(value, property) or inspect.isfunction(function):
            called = "" if isinstance(value, property) else _signature(function, bound=True)
            told = " ".join(_own_text(value).split())
            yield f"- `{name}.{member}{called}`{': ' if told else ''}{told}\n"


def _own_text(found: object) -> str:
    """A docstring without the options, which the table has."""
    return (inspect.getdoc(found) or "").partition("Options:\n")[0].strip()


def _short_call(name: str, options: list[Option]) -> str:
    first = [one.name for one in options if one.positional]
    needed = [one.name for one in options if not one.positional and one.default is inspect.Parameter.empty]
    return f"{name}({', '.join([*first, *(f'{one}=...' for one in needed), '**options'])})"


def _table(options: list[Option]) -> str:
    rows = ["| | type | default | |\n|---|---|---|---|\n"]
    for one in options:
        default = "" if one.default is inspect.Parameter.empty else f"`{one.default!r}`"
        cells = (f"`{one.name}`", f"`{one.type}`", default, one.why)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n")
    return "".join(rows)


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n\n"


def _signature(function: Callable[..., object], *, bound: bool = False) -> str:
    """As it is written: the value of a default may be this machine's."""
    written = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(written, ast.FunctionDef)
    if bound:
        del (written.args.posonlyargs or written.args.args)[0]
    returns = f" -> {ast.unparse(written.returns)}" if written.returns else ""
    return f"({ast.unparse(written.args)}){returns}"
