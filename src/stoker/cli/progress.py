"""Progress on stderr: a bar with rate and time left on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from stoker.formats.sizes import counted
from stoker.prepare.plan import Plan

_LINE_EVERY_S = 5.0
_VERBS = {"map": "tokenise", "match": "compare"}


class Progress:
    """Follows the stages of one run."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._bar = (
            Bar(
                TextColumn("{task.description:10}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                console=console,
            )
            if console.is_terminal
            else None
        )
        self._task: TaskID | None = None
        self._weights: list[int] = []
        self._verbs = _VERBS
        self._reads = ""  # the stage whose tasks read the sources
        self._total = self._done = self._bytes = 0
        self._started = self._said = time.monotonic()

    def planned(self, plan: Plan, folder: Path) -> None:
        self._weights = [sum(map(plan.piece_bytes, split)) for split in plan.splits]
        self._reads = next(iter(plan.stages))
        self._verbs = {**_VERBS, "map": "decode"} if plan.media else _VERBS
        self.note(
            f"{counted(len(plan.sources), 'source')}, {plan.bytes / 1e6:,.1f} MB, "
            f"{counted(len(plan.splits), 'task')}, "
            f"{_engine(plan)}, plan {plan.digest[:16]}"
        )

    def stage(self, name: str, *, total: int, done: int) -> None:
        self._total, self._done, self._bytes = total, done, 0
        self._started = self._said = time.monotonic()
        if self._bar:
            self._task = self._bar.add_task(self._verbs.get(name, name), total=total, completed=done, rate="")
        elif done:
            self.note(f"{self._verbs.get(name, name)}: {done} of {counted(total, 'task')} done before")

    def advance(self, name: str, number: int) -> None:
        self._done += 1
        self._bytes += self._weights[number] if name == self._reads else 0
        rate = (
            f"{self._bytes / 1e6 / max(1e-9, time.monotonic() - self._started):,.0f} MB/s"
            if self._bytes
            else ""
        )
        if self._bar and self._task is not None:
            self._bar.update(self._task, completed=self._done, rate=rate)
        elif self._done == self._total or time.monotonic() - self._said >= _LINE_EVERY_S:
            self._said = time.monotonic()
            done = f"{self._done} of {counted(self._total, 'task')}"
            self.note(f"{self._verbs.get(name, name)}: {done} {rate}{self._left()}")

    def note(self, text: str) -> None:
        if self._bar:  # without markup: names and documents may hold [brackets], which are meant as they are
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def _left(self) -> str:
        if self._done == self._total:
            return ""
        elapsed = time.monotonic() - self._started
        return f", {elapsed / self._done * (self._total - self._done):.0f} s left"

    def __enter__(self) -> Progress:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()


def _engine(plan: Plan) -> str:
    if plan.tokenizer:
        return f"engine {plan.tokenizer.engine} {plan.tokenizer.engine_version}"
    return plan.media.engine if plan.media else ""
