"""Batch-size sweep, `stoker watch --what-if batch`: half, double and the same size, one after another."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stoker.errors import BadInputError
from stoker.storage import new_file
from stoker.watch import runs
from stoker.watch.command import Options, watch
from stoker.watch.runs.batches import Split, Timed, split, timed
from stoker.watch.sizes import BatchFlag, Visit, visits
from stoker.watch.window import Window

Shown = Callable[[Path], AbstractContextManager[None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Visited:
    """A visit and what came of it; `timed` is None where it had too few steps."""

    visit: Visit
    code: int  # 0 where it was ended because its window was over
    interrupted: bool  # by somebody else, who wants no further visit
    timed: Timed | None

    def as_dict(self) -> dict[str, Any]:
        return {
            "folder": self.visit.folder,
            "batch": self.visit.batch,
            "code": self.code,
            "step_s": self.timed.step_s if self.timed else None,
            "steps": self.timed.steps if self.timed else 0,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """All visits, and the line through them where enough was measured."""

    flag: str
    given: int
    visited: tuple[Visited, ...]
    split: Split | None

    @property
    def code(self) -> int:
        """That of the run with the size as given; of the last one where it never came to that."""
        own = [one.code for one in self.visited if one.visit.batch == self.given]
        return (own or [one.code for one in self.visited])[-1]

    @property
    def interrupted(self) -> bool:
        return any(one.interrupted for one in self.visited)

    @property
    def failed(self) -> dict[int, int]:
        """Sizes that ended badly, and with which code."""
        return {one.visit.batch: one.code for one in self.visited if one.code}

    def as_dict(self) -> dict[str, Any]:
        return {
            "flag": self.flag,
            "given": self.given,
            "split": self.split.as_dict() if self.split else None,
            "visits": [one.as_dict() for one in self.visited],
        }


def watch_sizes(flag: BatchFlag, options: Options, *, window_s: float, shown: Shown) -> WhatIf:
    """Visit every size, each in a folder of its own; leaves `whatif.json` beside them."""
    visited: list[Visited] = []
    for visit in visits(flag.batch, window_s=window_s):
        if any(one.code and one.visit.batch == visit.batch for one in visited):
            continue  # a size that did not fit into memory will not fit the second time
        visited.append(_visit(visit, flag.command_with(visit.batch), options, shown))
        if visited[-1].interrupted:
            break
    measured = [one.timed for one in visited if one.timed]
    found = WhatIf(
        flag=flag.name, given=flag.batch, visited=tuple(visited), split=split(flag.batch, measured)
    )
    with new_file(options.folder / "whatif.json") as file:
        file.write(json.dumps(found.as_dict(), indent=2).encode() + b"\n")
    return found


def _visit(visit: Visit, command: Sequence[str], options: Options, shown: Shown) -> Visited:
    folder = options.folder / visit.folder
    window = Window(folder, seconds=visit.window_s)
    with shown(folder):
        code = watch(command, replace(options, folder=folder), window=window)
    code = 0 if window.over else code
    return Visited(
        visit=visit,
        code=code,
        interrupted=window.interrupted,
        timed=None if code or window.interrupted else _timed(folder, batch=visit.batch),
    )


def _timed(folder: Path, *, batch: int) -> Timed | None:
    try:
        return timed(runs.read_recording(folder), batch=batch)
    except BadInputError:
        return None
