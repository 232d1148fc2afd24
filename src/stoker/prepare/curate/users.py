"""A user's own code as a step: a filter of a text, and what a plan must know of its source."""

from __future__ import annotations

import inspect
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from stoker.errors import UsageError
from stoker.prepare.curate.batch import Batch, Outcome
from stoker.prepare.sources.documents import BadRecord, Texts


@dataclass(frozen=True, kw_only=True)
class UserFilter:
    """A function of a text that returns whether to keep it, or the text to keep instead."""

    function: str
    name: str = "filter"

    @cached_property
    def _call(self) -> Callable[[str], Any]:
        return load_function(self.function)

    def run(self, batch: Batch) -> Outcome:
        texts: list[str] = []
        reasons: list[str] = []
        bad: dict[int, BadRecord] = {}
        for number, text in enumerate(batch.texts.strings):
            try:
                kept, reason = _judged(self._call(text), text)
            except (Exception, SystemExit) as error:  # whatever the user's code raises
                detail = f"the filter {self.function}: {type(error).__name__}: {error}"
                bad[number] = BadRecord(where="", reason="filter_failed", detail=detail)
                kept, reason = text, "filter_failed"
            texts.append(kept)
            reasons.append(reason)
        return Outcome(reasons=reasons, texts=Texts.of(texts), bad=bad)


def _judged(verdict: Any, text: str) -> tuple[str, str]:
    """Anything but what was agreed on is an error: a scrubber that returns bytes has scrubbed nothing."""
    if isinstance(verdict, str):
        verdict.encode()
        return verdict, "" if verdict else "empty"
    if verdict is None or isinstance(verdict, bool) or _is_numpy_bool(verdict):
        return text, "" if verdict else "filter"
    raise TypeError(f"it returned {type(verdict).__name__}, not a str, a bool or None")


def _is_numpy_bool(verdict: Any) -> bool:
    return type(verdict).__module__ == "numpy" and type(verdict).__name__ in ("bool", "bool_")  # 2, 1


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `module:function`."""
    module, separator, function = name.partition(":")
    try:
        if not separator:
            raise ImportError("no colon in the name")
        loaded: Callable[..., Any] = getattr(import_module(module), function)
        if not callable(loaded):
            raise TypeError(f"{function} is no function")
    except Exception as error:  # whatever the user's module raises when it is imported
        raise UsageError(
            f"cannot load the filter {name!r}: {error}",
            hint="write it as module:function, and put the module's folder on PYTHONPATH",
        ) from error
    return loaded


def code_digest(name: str) -> str:
    """A hash of the function's module and of the modules of the user's own that it imports: a plan knows when
    one of them changed."""
    function = load_function(name)
    module = inspect.getmodule(function)
    sources = sorted(_sources_of(module, {}).items()) if module else []
    return xxhash.xxh3_128_hexdigest(repr((name, sources)).encode())


def _sources_of(module: ModuleType, seen: dict[str, str]) -> dict[str, str]:
    """The text of a module and of all it names, but for what was installed."""
    file = getattr(module, "__file__", None)
    if module.__name__ in seen or not file or _is_installed(Path(file)):
        return seen
    try:
        seen[module.__name__] = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError):  # native code has no source to read
        seen[module.__name__] = str(Path(file).stat().st_size)
    for value in list(vars(module).values()):
        named = (
            value
            if isinstance(value, ModuleType)
            else sys.modules.get(getattr(value, "__module__", None) or "")
        )
        if named is not None:
            _sources_of(named, seen)
    return seen


def _is_installed(path: Path) -> bool:
    roots = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return any(path.is_relative_to(root) for root in roots) or path.is_relative_to(Path(__file__).parents[2])
