"""Source edit: a setting as a change to the user's file, at the call that builds the loader.

Keyword arguments are replaced or added by the positions of the parsed call; everything else stays byte for
byte. A call that cannot be changed so (`**options`, settings by position) is left alone: then the setting is
said in words.
"""

from __future__ import annotations

import ast
import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.storage import named_errors
from stoker.tune.candidates import Setting
from stoker.watch.inside.knobs import OF_LOADER

# What transformers' TrainingArguments call the settings of its loaders.
_OF_TRAINER = {
    "num_workers": "dataloader_num_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
}
_COMMENTED = re.compile(rb"[ \t]*,[ \t]*#[^\r\n]*")  # after a last argument
_BY_POSITION = 5  # arguments of a DataLoader before num_workers


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """A file as it was read and as it is to be."""

    path: Path
    before: bytes
    after: bytes
    replaced: tuple[str, ...] = ()  # settings that were no plain value: an option, say, that now does nothing

    @property
    def diff(self) -> str:
        """Unified, as `patch -p0` takes it."""
        old, new = (one.decode("utf-8").splitlines(keepends=True) for one in (self.before, self.after))
        name = os.path.relpath(self.path)
        return "".join(_ended(line) for line in difflib.unified_diff(old, new, fromfile=name, tofile=name))

    def write(self) -> None:
        """Only if nobody has changed the file meanwhile; it keeps its mode."""
        with named_errors("write", self.path):
            if self.path.read_bytes() != self.before:
                raise UsageError(
                    f"{self.path} was changed while the trials ran",
                    hint="apply the diff by hand, or tune again",
                )
            mode = self.path.stat().st_mode
            scratch = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
            scratch.write_bytes(self.after)
            scratch.chmod(mode)
            scratch.replace(self.path)


def edit_for(site: Mapping[str, Any], setting: Setting) -> Edit | None:
    """None where the file or its call cannot be changed safely."""
    wanted = {name: setting[name] for name in OF_LOADER if name in setting}
    try:
        path = Path(site.get("file") or "").resolve(strict=True)
        before = path.read_bytes()
        before.decode("utf-8")  # the parser's positions are those of UTF-8
        tree = ast.parse(before)
    except (OSError, SyntaxError, ValueError):
        return None
    if "transformers" in site.get("through", ()):
        wanted = {_OF_TRAINER.get(name, ""): value for name, value in wanted.items()}
        calls = [one for one in _calls(tree) if _name(one).endswith("TrainingArguments")]
    else:
        calls = [one for one in _calls(tree) if _builds_loader(one, int(site.get("line") or 0))]
        calls = [] if site.get("through") else calls
    if len(calls) != 1 or not wanted or "" in wanted or not _is_plain(calls[0]):
        return None
    after = _changed(before, calls[0], wanted)
    if not _is_meant(after, calls[0], wanted):
        return None
    return Edit(path=path, before=before, after=after, replaced=_not_plain(calls[0], wanted))


def _not_plain(call: ast.Call, wanted: Mapping[str, Any]) -> tuple[str, ...]:
    given = [one for one in call.keywords if one.arg in wanted and not isinstance(one.value, ast.Constant)]
    return tuple(f"{one.arg}={ast.unparse(one.value)}" for one in given)


def in_words(site: Mapping[str, Any], setting: Setting) -> list[str]:
    """Each knob as somebody would write it by hand."""
    trainer = "transformers" in site.get("through", ())
    loader = {name: setting[name] for name in OF_LOADER if name in setting}
    named = {(_OF_TRAINER.get(name, name) if trainer else name): value for name, value in loader.items()}
    said = [f"{'TrainingArguments' if trainer else 'DataLoader'}({_arguments(named)})"] if named else []
    threads = setting.get("torch_threads")
    lines = {
        "torch_threads": f"torch.set_num_threads({threads})",
        "non_blocking": "batch.to(device, non_blocking=True)",
        "tf32": 'torch.set_float32_matmul_precision("high")',
        "channels_last": "model.to(memory_format=torch.channels_last)",
        "compile": "model.compile()",
        "fused_optimizer": "fused=True for the optimizer",
    }
    said += [lines[name] for name in lines if setting.get(name)]
    return said + [f"export {name}={value}" for name, value in setting.items() if name.isupper()]


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def _builds_loader(call: ast.Call, line: int) -> bool:
    return _name(call).endswith("DataLoader") and call.lineno <= line <= (call.end_lineno or call.lineno)


def _is_plain(call: ast.Call) -> bool:
    """Nothing in it may hold the setting already without saying so."""
    starred = any(isinstance(one, ast.Starred) for one in call.args)
    return not starred and all(one.arg for one in call.keywords) and len(call.args) <= _BY_POSITION


def _changed(before: bytes, call: ast.Call, wanted: Mapping[str, Any]) -> bytes:
    """From the back to the front: positions before a change stay what they were."""
    starts = _line_starts(before)
    values = {one.arg: one.value for one in call.keywords}
    changes = [
        (_at(starts, values[name].lineno, values[name].col_offset), _end(starts, values[name]), repr(value))
        for name, value in wanted.items()
        if name in values
    ]
    new = {name: value for name, value in wanted.items() if name not in values}
    if new:
        changes.append(_addition(before, starts, call, new))
    for start, end, text in sorted(changes, reverse=True):
        before = before[:start] + text.encode() + before[end:]
    return before


def _is_meant(after: bytes, call: ast.Call, wanted: Mapping[str, Any]) -> bool:
    """Parsed again: the same call with these arguments, and no other (a bracket around the last one, say)."""
    given = {one.arg: ast.dump(one.value) for one in call.keywords}
    given |= {name: ast.dump(ast.parse(repr(value), mode="eval").body) for name, value in wanted.items()}
    try:
        calls = _calls(ast.parse(after))
    except (SyntaxError, ValueError):
        return False
    same = [
        one
        for one in calls
        if (one.lineno, one.col_offset, _name(one)) == (call.lineno, call.col_offset, _name(call))
    ]
    return any(
        {one.arg: ast.dump(one.value) for one in found.keywords} == given
        and len(found.args) == len(call.args)
        for found in same
    )


def _addition(
    before: bytes, starts: list[int], call: ast.Call, new: Mapping[str, Any]
) -> tuple[int, int, str]:
    """After the last argument: on lines of their own where that has one."""
    parts = [*call.args, *(one.value for one in call.keywords)]
    if not parts:
        at = _end(starts, call) - 1
        return at, at, _arguments(new)
    last = max(parts, key=lambda one: _end(starts, one))
    at = _end(starts, last)
    begins = [*(one.lineno for one in call.args), *(one.lineno for one in call.keywords)]
    first, begun = min(begins), max(begins)
    lead = before[starts[begun - 1] : at]
    indent = lead[: len(lead) - len(lead.lstrip())].decode()
    own_lines = first > call.lineno and begun > first
    ending = "\r\n" if before[: starts[call.lineno]].endswith(b"\r\n") else "\n"
    rest = before[at : starts[last.end_lineno or 0]] if last.end_lineno else b""
    if own_lines and (said := _COMMENTED.match(rest)):  # a comment stays with the argument that it is about
        after = at + len(said[0])
        return after, after, "".join(f"{ending}{indent}{name}={value!r}," for name, value in new.items())
    between = f",{ending}{indent}" if own_lines else ", "
    return at, at, "".join(f"{between}{name}={value!r}" for name, value in new.items())


def _arguments(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in named.items())


def _line_starts(text: bytes) -> list[int]:
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    return starts


def _at(starts: list[int], line: int, column: int) -> int:
    return starts[line - 1] + column


def _end(starts: list[int], node: ast.expr) -> int:
    return _at(starts, node.end_lineno or node.lineno, node.end_col_offset or 0)


def _ended(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
