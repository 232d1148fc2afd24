"""Spans: pieces of wall time in a run, said by whoever spends them.

The stages call `span(...)` around their work. It does nothing until `recording(folder)` is entered;
then each process appends its spans to its own file of the run folder, one JSON object a line, so that
a killed process loses at most the line it was writing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """What was done, from when to when (seconds of the monotonic clock)."""

    what: str
    start: float
    end: float
    rank: int = 0
    step: int | None = None
    bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


class _Recorder:
    """Appends spans to one file; any thread may call it."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._file = path.open("a", encoding="utf-8")
        self._lock = threading.Lock()

    def write(self, span: Span) -> None:
        line = json.dumps({k: v for k, v in asdict(span).items() if v is not None}) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()

    def close(self) -> None:
        self._file.close()


# The one changing variable of this module: None, or where spans go. Every stage may emit from any
# thread, so it can be neither an argument of every function nor a context variable.
_recorder: _Recorder | None = None


def emit(what: str, *, start: float, end: float, step: int | None = None, bytes: int = 0) -> None:
    """Say that `what` took from `start` to `end`. Costs one comparison when nothing records."""
    recorder = _recorder
    if recorder is not None:
        recorder.write(Span(what=what, start=start, end=end, rank=recorder.rank, step=step, bytes=bytes))


@contextmanager
def span(what: str, *, step: int | None = None, bytes: int = 0) -> Iterator[None]:
    """Emit the time this block took."""
    if _recorder is None:
        yield
        return
    start = time.monotonic()
    try:
        yield
    finally:
        emit(what, start=start, end=time.monotonic(), step=step, bytes=bytes)


@contextmanager
def recording(folder: Path, *, rank: int = 0) -> Iterator[None]:
    """Record this process's spans into `folder` while the block runs."""
    global _recorder
    folder.mkdir(parents=True, exist_ok=True)
    before, _recorder = _recorder, _Recorder(folder / f"spans-{rank:05d}-{os.getpid()}.jsonl", rank)
    try:
        yield
    finally:
        mine, _recorder = _recorder, before
        mine.close()


def read_spans(folder: Path) -> list[Span]:
    """Every whole span of a run folder, in order of start; a torn last line is left out."""
    spans = []
    for path in sorted(folder.glob("spans-*.jsonl")):
        for line in path.read_text("utf-8").split("\n")[:-1]:
            spans.append(Span(**json.loads(line)))
    return sorted(spans, key=lambda span: span.start)
