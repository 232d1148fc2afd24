"""Spans of a test, recorded into rings and read back one by one, through the reader that `watch` uses."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stoker.spans import NO_STEP, Recorder, Ring, record_to
from stoker.watch.runs.columns import read_ring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """One record of a ring."""

    what: str
    start: float
    end: float
    step: int | None
    bytes: int
    thread: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Record this process's spans into `folder` while the block runs."""
    mine = Recorder(Ring(folder / f"spans-{os.getpid()}-{time.monotonic_ns()}.ring", capacity=1000))
    before = record_to(mine)
    try:
        yield
    finally:
        record_to(before)
        mine.close()


def read_spans(folder: Path) -> list[Span]:
    """Every span of a folder's rings, in order of start."""
    found = [span for path in sorted(folder.glob("spans-*.ring")) for span in spans_of(path)]
    return sorted(found, key=lambda span: span.start)


def spans_of(path: Path) -> list[Span]:
    """The spans of one ring in the order they were written."""
    ring = read_ring(path)
    return [
        Span(
            what=ring.names[int(one["what"])],
            start=float(one["start"]),
            end=float(one["end"]),
            step=None if one["step"] == NO_STEP else int(one["step"]),
            bytes=int(one["bytes"]),
            thread=int(one["thread"]),
        )
        for one in ring.records
    ]
