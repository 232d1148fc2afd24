"""The GPU's side of the ledger: how long the cards were busy, and what the host did while they were idle.

The readings of a card tell what part of a second was busy. What the host did in that second is known from
the timeline, so the idle part is shared out among those states: to those in which the host gives a card
nothing to do first, then to launching kernels, then to waiting for the card itself, which is idle only when
the wait is over. Where a profiler saw every event of the card, nothing needs to be shared
out. Busy and idle sum to the wall time, as the loop's own states do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.diagnose.activity import busy_of
from stoker.diagnose.timeline import STATES, Timeline
from stoker.intervals import Intervals
from stoker.recording import Floats, GpuRecord, RankRecord, Recording, Samples

# Who is asked first why a card is idle; compute is the host launching kernels.
_ORDER = (
    ("startup", "data", "checkpoint", "stalled", "unattributed", "evaluation", "copy"),
    ("compute", "collective"),
    ("sync",),
)


# Shared out reading by reading, at 10 Hz, a fifth of the waits for data that an H200 was recorded in would be
# told of the arithmetic beside them.
_STRETCH_S = 1.0
# Percent of the time in which a kernel ran, the best first, and how much later than that time it is read, as
# the steps of the recordings show. The own counter of a card knows kernels from copies: of a loop that copied
# 47% of its time, pinned, it said 52% and the utilisation of NVML 98% (recording h2d_pinned). Of 438 small
# kernels a step it said what a CUDA graph then took for them (tests/diagnose/h200.json). SM activity is no
# measure of it: in a kernel that fills a part of the card it is that part.
BUSY = {"graphics_util": 0.13, "util": 0.18}
_COUNTED = "graphics_util"
_WHOLE = 0.9  # of the recording in one look: then its events are the ledger, and no reading is needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Shares of the wall time, mean over the cards: `busy`, and idle by what the host did meanwhile."""

    busy: float
    idle: dict[str, float]
    exact: bool = False  # of kernels alone, counted by the card or a profiler: not NVML's utilisation
    by_events: bool = (
        False  # a profiler's: idle holds the microsecond between two kernels, which no counter sees
    )

    @property
    def launching(self) -> float:
        """Idle while the host launched kernels: it cannot launch faster, or not far enough ahead."""
        return self.idle["compute"]


def ledger(
    recording: Recording, lines: tuple[Timeline, ...], *, within: Intervals | None = None
) -> Ledger | None:
    """The cards' ledger of the recording, or of parts of it; None where no card was read then."""
    if within is None:
        return _ledger(recording, lines, 0.0, recording.wall_s)
    told = [
        (end - start, _ledger(recording, lines, start, end))
        for start, end in zip(within.start.tolist(), within.end.tolist(), strict=True)
    ]
    parts = [(seconds, part) for seconds, part in told if part is not None]
    whole = sum(seconds for seconds, _ in parts)
    if whole <= 0:
        return None
    return Ledger(
        busy=sum(seconds * part.busy for seconds, part in parts) / whole,
        idle={name: sum(seconds * part.idle[name] for seconds, part in parts) / whole for name in STATES},
        exact=all(part.exact for _, part in parts),
        by_events=all(part.by_events for _, part in parts),
    )


def _ledger(recording: Recording, lines: tuple[Timeline, ...], begin_s: float, end_s: float) -> Ledger | None:
    if end_s <= begin_s:
        return None
    by_rank = {rank.gpu: line for rank, line in zip(recording.ranks, lines, strict=True)}
    whole = [
        _of_events(rank, line, begin_s, end_s) for rank, line in zip(recording.ranks, lines, strict=True)
    ]
    counted = [one for one in whole if one is not None]
    if counted and len(counted) == len(whole):
        return _told(counted, exact=True, by_events=True)
    pairs = [
        (gpu, by_rank.get(gpu.index, lines[0]))
        for gpu in recording.gpus
        if lines and len(gpu.samples.t) and busy_column(gpu.samples)
    ]
    each = [found for gpu, line in pairs if (found := _of_card(gpu, line, begin_s, end_s)) is not None]
    return _told(each, exact=all(_counted(gpu.samples) for gpu, _ in pairs)) if each else None


def _counted(samples: Samples) -> bool:
    return busy_column(samples) == _COUNTED


def busy_column(samples: Samples) -> str:
    """The best column there is; "" where none was read."""
    return next((one for one in BUSY if np.isfinite(samples.columns.get(one, np.nan)).any()), "")


def _told(each: list[Floats], *, exact: bool, by_events: bool = False) -> Ledger:
    shares = dict(zip(STATES, np.mean(each, axis=0).tolist(), strict=True))
    busy = max(1.0 - sum(shares.values()), 0.0)
    return Ledger(busy=busy, idle=shares, exact=exact, by_events=by_events)


def _of_events(rank: RankRecord, line: Timeline, begin_s: float, end_s: float) -> Floats | None:
    """Idle share by state where one look lasts as long as this; None otherwise."""
    lasts = end_s - begin_s
    look = next((one for one in rank.looks if one.end_s - one.start_s >= _WHOLE * lasts), None)
    if look is None:
        return None
    gaps = busy_of(look).gaps(begin_s, end_s)
    shares: Floats = np.array([line.within(state, gaps.start, gaps.end).sum() for state in STATES]) / lasts
    return shares


def _of_card(gpu: GpuRecord, line: Timeline, begin_s: float, end_s: float) -> Floats | None:
    """Idle share of the time by state. What was not read is as what was: the mean is carried on."""
    starts, ends, idle = _stretches(gpu.samples, begin_s, end_s)
    if not len(starts):
        return None
    spent = np.stack([line.within(state, starts, ends) for state in STATES])
    left = idle * (ends - starts)
    found = np.zeros(len(STATES))
    for group in _ORDER:
        rows = [STATES.index(name) for name in group]
        there = spent[rows].sum(axis=0)
        taken = np.minimum(left, there)
        share = np.divide(taken, there, out=np.zeros_like(taken), where=there > 0)
        found[rows] += (spent[rows] * share).sum(axis=1)
        left = left - taken
    shares: Floats = found / (end_s - begin_s)
    return shares


def _stretches(samples: Samples, begin_s: float, end_s: float) -> tuple[Floats, Floats, Floats]:
    """Start, end and idle share of stretches of a second, or of one reading where that is longer."""
    name, nothing = busy_column(samples), np.zeros(0)
    if not name:
        return nothing, nothing, nothing
    column, at = samples.columns[name], samples.t - min(BUSY[name], float(samples.t[0]))
    known = np.isfinite(column) & (at > begin_s) & (at <= end_s)
    t, busy = at[known], np.clip(column[known] / 100, 0.0, 1.0)
    if not len(t):
        return nothing, nothing, nothing
    begins = np.concatenate([[begin_s], t[:-1]])
    number = np.floor(t / _STRETCH_S - 1e-9).astype(int)
    _, first = np.unique(number, return_index=True)
    starts = begins[first]
    ends = np.append(starts[1:], end_s)
    length = t - begins
    idle: Floats = np.add.reduceat((1.0 - busy) * length, first) / np.add.reduceat(length, first)
    return starts, ends, idle
