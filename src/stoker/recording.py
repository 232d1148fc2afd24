"""A recording: what was seen of a run. `watch` makes one, `diagnose` explains it, `report` shows it.

Times are seconds since the run began, on one clock for all ranks. Samples are columns; a reading that
could not be taken is NaN, a column that could not be read at all is absent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

# What a span of time in a training process is spent on. The order is the order of precedence where spans
# overlap without nesting: the more specific wins. A nested span takes its time from the one around it.
KINDS = (
    "startup",  # from process start to the first step
    "data",  # waiting in the loader's next
    "h2d",  # host-to-device copies the loop waits for
    "forward",
    "backward",
    "optimizer",
    "compute",  # forward, backward and optimizer where they cannot be told apart
    "collective",
    "checkpoint",
    "evaluation",
    "sync",  # the host waiting for the device: .item(), .cpu(), synchronize()
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """One rank's spans as columns, sorted by start. `kind` indexes KINDS; `step` is -1 outside steps."""

    kind: NDArray[np.uint8]
    start: Floats
    end: Floats
    step: NDArray[np.int64]
    bytes: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Steps:
    """One rank's finished steps as columns; a step starts where the one before it ended. Unknown: NaN."""

    number: NDArray[np.int64]
    start: Floats
    end: Floats
    tokens: Floats
    flops: Floats


Rows = TypeVar("Rows", Spans, Steps)


def kept(rows: Rows, which: Mask) -> Rows:
    """Of spans or steps these rows, in every column."""
    return replace(rows, **{one.name: getattr(rows, one.name)[which] for one in fields(rows)})


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """Readings of one device or host; docs/concepts/recording.md names the columns and their units."""

    t: Floats
    columns: dict[str, Floats]

    def mean(self, name: str) -> float:
        """The mean of a column, NaN where it was never read."""
        column = self.columns.get(name)
        if column is None or np.isnan(column).all():
            return float("nan")
        return float(np.nanmean(column))

    def kept(self, which: Mask) -> Samples:
        """These readings, in every column."""
        return Samples(t=self.t[which], columns={name: c[which] for name, c in self.columns.items()})

    def since(self, began_s: float) -> Samples:
        """The readings from a moment on, in seconds since then."""
        late = self.kept(self.t >= began_s)
        return replace(late, t=late.t - began_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something of one moment: a stack in a gap, a hook switched off, a worker's death, an exit."""

    t: float
    what: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)  # plain JSON values


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Where looks at the loop's stack met it: in which span ("": none), doing what, on which line."""

    inside: str
    what: str  # batch, logging, metrics, output, io, gc, lock, optimizer, compute, other
    line: str  # file:line function, of the user's program
    seconds: float
    looks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """What a sampling profiler saw of one process; `late` of `looks` were held up by another thread."""

    seconds: float = 0.0
    seen: tuple[Seen, ...] = ()
    looks: int = 0
    late: int = 0
    threads: dict[str, int] = field(default_factory=dict)  # line and thread → looks in which it held us up
    gc_s: float = 0.0  # in the garbage collector
    gc_count: int = 0
    gc_lines: dict[str, float] = field(default_factory=dict)  # the user's line it ran in → seconds


# What a card does, as torch's profiler tells it.
WORK = ("kernel", "collective", "h2d", "d2h", "copy", "memset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Activity:
    """What one rank's card did in a window of the run, event by event: a deep look, or a whole trace."""

    start_s: float
    end_s: float
    names: tuple[str, ...]
    name: NDArray[np.int32]  # indexes `names`
    kind: NDArray[np.uint8]  # indexes WORK
    start: Floats
    end: Floats
    launched: Floats  # when the host's call began that queued it; NaN where that was not seen
    bytes: NDArray[np.int64]

    def moved(self, by_s: float) -> Activity:
        """The same, so much later."""
        times = {name: getattr(self, name) + by_s for name in _TIMES}
        return replace(self, **times)


_TIMES = ("start_s", "end_s", "start", "end", "launched")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """What one training process did."""

    rank: int
    node: str
    gpu: int | None
    spans: Spans
    steps: Steps
    memory: Samples  # allocator: allocated, reserved (bytes), retries (count)
    events: tuple[Event, ...] = ()
    stacks: Stacks = field(default_factory=Stacks)
    looks: tuple[Activity, ...] = ()  # deep looks; of a profiler's trace one that lasts as long as it

    def moved(self, by_s: float) -> RankRecord:
        """The same, so much later; nothing to be done for no time."""
        if not by_s:
            return self
        return replace(
            self,
            spans=replace(self.spans, start=self.spans.start + by_s, end=self.spans.end + by_s),
            steps=replace(self.steps, start=self.steps.start + by_s, end=self.steps.end + by_s),
            memory=replace(self.memory, t=self.memory.t + by_s),
            events=tuple(replace(event, t=event.t + by_s) for event in self.events),
            looks=tuple(look.moved(by_s) for look in self.looks),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuRecord:
    """One card: what it is (name, power_limit_w, memory_bytes, driver) and how it was used."""

    node: str
    index: int
    name: str
    power_limit_w: float
    memory_bytes: int
    samples: Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class HostRecord:
    """One node: allowed cores, CPU quota in cores (inf: none), and its samples."""

    node: str
    cpus: int
    quota_cores: float
    samples: Samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """A run as seen: who ran, for how long, how it ended, and everything read meanwhile."""

    title: str
    wall_s: float
    ended: str  # "exit 0", "killed by SIGBUS", "running", …; "" where unknown
    ranks: tuple[RankRecord, ...]
    gpus: tuple[GpuRecord, ...]
    hosts: tuple[HostRecord, ...]
    facts: dict[str, Any] = field(default_factory=dict)  # argv, torch, loader settings: plain JSON values
