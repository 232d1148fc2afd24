"""How staging goes, on stderr: bars with rate and time left on a terminal, plain lines in a log."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stoker.formats.sizes import counted, say_size
from stoker.stage.plan import Unit
from stoker.stage.run import Watcher

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

_LINE_EVERY_S = 5.0


class StageProgress(Watcher):
    """A watcher of `stage`; called from several threads."""

    def __init__(self) -> None:
        self._bars = _bars() if sys.stderr.isatty() else None
        self._lock = threading.Lock()
        self._total: TaskID | None = None
        self._rows: dict[str, TaskID] = {}
        self._waiting: dict[str, str] = {}
        self._units = self._done = self._files = self._bytes = self._landed = self._passed = 0
        self._began = self._said = time.monotonic()

    def planned(self, url: str, units: Sequence[Unit]) -> None:
        with self._lock:
            self._units, self._done = len(units), 0
            self._files = sum(len(unit.files) for unit in units)
            self._bytes, self._landed, self._passed = sum(unit.bytes for unit in units), 0, 0
            self._began = self._said = time.monotonic()
            if self._bars:
                self._total = self._bars.add_task(url, total=self._bytes, state="")
            self._print(f"{url}: {counted(self._files, 'file')}, {say_size(self._bytes)}")

    def began(self, unit: Unit) -> None:
        if self._bars:
            with self._lock:
                self._rows[unit.key] = self._bars.add_task(f"  {_name(unit)}", total=unit.bytes, state="")

    def landed(self, unit: Unit, count: int) -> None:
        with self._lock:
            self._landed += count
            if self._bars and self._total is not None:
                self._bars.advance(self._total, count)
                self._bars.update(self._rows[unit.key], advance=count, state="")
            elif time.monotonic() - self._said >= _LINE_EVERY_S:
                self._say()

    def waits(self, unit: Unit, holder: str) -> None:
        with self._lock:
            if self._bars:
                self._bars.update(self._rows[unit.key], state=f"waits for {holder}")
            elif self._waiting.get(unit.key) != holder:
                self._print(f"{_name(unit)}: another brings it, {holder}")
            self._waiting[unit.key] = holder

    def damaged(self, unit: Unit, names: Sequence[str]) -> None:
        with self._lock:
            for name in names:
                self._print(f"{name}: damaged on the disk, fetched again")

    def troubled(self, text: str) -> None:
        with self._lock:
            self._print(text)

    def done(self, unit: Unit) -> None:
        with self._lock:
            self._done += 1
            self._passed += unit.bytes
            if self._bars and self._total is not None:
                self._bars.remove_task(self._rows.pop(unit.key))
                self._bars.update(self._total, completed=max(self._passed, self._landed))
            elif self._done == self._units or time.monotonic() - self._said >= _LINE_EVERY_S:
                self._say()

    def __enter__(self) -> StageProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def _say(self) -> None:
        self._said = time.monotonic()
        seconds = max(1e-9, self._said - self._began)
        rate, here = self._landed / seconds, min(self._bytes, max(self._passed, self._landed))
        left = f", {(self._bytes - here) / rate:.0f} s left" if rate and here < self._bytes else ""
        fetched = f", {say_size(rate)}/s" if self._landed else ", all of it was here"
        self._print(
            f"{self._done:,} of {counted(self._units, 'unit')}, "
            f"{say_size(here)} of {say_size(self._bytes)}{fetched}{left}"
        )

    def _print(self, text: str) -> None:
        if self._bars:
            self._bars.console.print(text, markup=False)
        else:
            print(text, file=sys.stderr, flush=True)


def _bars() -> Bars | None:
    from rich.console import Console  # 30 ms, and a log has no bars
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:  # a terminal that cannot draw
        return None
    return Progress(
        TextColumn("{task.description}", markup=False),  # names may hold brackets
        BarColumn(bar_width=24),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[state]}", markup=False),
        console=console,
    )


def _name(unit: Unit) -> str:
    first = unit.files[0].name
    return first if len(unit.files) == 1 else f"{first} and {len(unit.files) - 1:,} more"
