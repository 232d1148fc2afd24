"""The GPU's side of the ledger: how long the cards were busy, and what the host did while they were idle.

The readings of a card tell what part of a second was busy. What the host did in that second is known from the
timeline, so the idle part is shared out among those states: to those in which the host gives a card nothing to
do first, then to launching kernels, then to waiting for the card itself, which is idle only when the wait is
over. Where a profiler saw every event of the card, nothing needs to be shared
out. Busy and idle sum to the wall time, as the loop's own states do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.diagnose.activity import busy_of
from stoker.diagnose.timeline import STATES, Timeline
from stoker.recording import Floats, GpuRecord, RankRecord, Recording, Samples

# Who is asked first why a card is idle; compute is the host launching kernels.
_ORDER = (
    ("startup", "data", "checkpoint", "stalled", "unattributed", "evaluation", "copy"),
    ("compute", "collective"),
    ("sync",),
)


# Counters come a tenth of a second late: shared out reading by reading, at 10 Hz, a quarter of an H200's waits for
# data was told of the arithmetic after them (recordings starved_steady).
_STRETCH_S = 1.0
# The card's own counter knows kernels from copies and says what NVML's utilisation only samples: of a loop that
# copied 47% of its time, pinned, the one said 52% and the other 98% (recording h2d_pinned).
BUSY = ("graphics_util", "util")
_WHOLE = 0.9  # of the recording in one look: then its events are the ledger, and no reading is needed


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """Shares of the wall time, mean over the cards: `busy`, and idle by what the host did meanwhile."""

    busy: float
    idle: dict[str, float]

    @property
    def launching(self) -> float:
        """Idle while the host launched kernels: it cannot launch faster, or not far enough ahead."""
        return self.idle["compute"]


def ledger(recording: Recording, lines: tuple[Timeline, ...]) -> Ledger | None:
    """The cards' ledger; None where no card was read."""
    by_rank = {rank.gpu: line for rank, line in zip(recording.ranks, lines, strict=True)}
    whole = [
        _of_events(rank, line, recording.wall_s) for rank, line in zip(recording.ranks, lines, strict=True)
    ]
    exact = [one for one in whole if one is not None]
    if exact and len(exact) == len(whole):
        return _told(exact)
    pairs = [
        (gpu, by_rank.get(gpu.index, lines[0]))
        for gpu in recording.gpus
        if lines and len(gpu.samples.t) and busy_column(gpu.samples) is not None
    ]
    if not pairs or recording.wall_s <= 0:
        return None
    each = [_of_card(gpu, line, recording.wall_s) for gpu, line in pairs]
    return _told(each)


def busy_column(samples: Samples) -> Floats | None:
    """Percent of the time in which a kernel ran, by the best there is; None where nothing was read."""
    return next(
        (samples.columns[one] for one in BUSY if np.isfinite(samples.columns.get(one, np.nan)).any()), None
    )


def _told(each: list[Floats]) -> Ledger:
    shares = dict(zip(STATES, np.mean(each, axis=0).tolist(), strict=True))
    return Ledger(busy=max(1.0 - sum(shares.values()), 0.0), idle=shares)


def _of_events(rank: RankRecord, line: Timeline, wall_s: float) -> Floats | None:
    """Idle share by state where one look lasts as long as the recording; None otherwise."""
    look = next((one for one in rank.looks if one.end_s - one.start_s >= _WHOLE * wall_s), None)
    if look is None or wall_s <= 0:
        return None
    gaps = busy_of(look).gaps(0.0, wall_s)
    shares: Floats = np.array([line.within(state, gaps.start, gaps.end).sum() for state in STATES]) / wall_s
    return shares


def _of_card(gpu: GpuRecord, line: Timeline, wall_s: float) -> Floats:
    """Idle share of the wall time by state. What was not read is as what was: the mean is carried on."""
    starts, ends, idle = _stretches(gpu.samples, wall_s)
    if not len(starts):
        return np.zeros(len(STATES))
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
    shares: Floats = found / wall_s
    return shares


def _stretches(samples: Samples, wall_s: float) -> tuple[Floats, Floats, Floats]:
    """Start, end and idle share of stretches of a second or of one reading, whichever is longer."""
    column = busy_column(samples)
    if column is None:
        return np.zeros(0), np.zeros(0), np.zeros(0)
    known = np.isfinite(column) & (samples.t > 0) & (samples.t <= wall_s)
    t, busy = samples.t[known], np.clip(column[known] / 100, 0.0, 1.0)
    if not len(t):
        return np.zeros(0), np.zeros(0), np.zeros(0)
    begins = np.concatenate([[0.0], t[:-1]])
    number = np.floor(t / _STRETCH_S - 1e-9).astype(int)
    _, first = np.unique(number, return_index=True)
    starts = begins[first]
    ends = np.append(starts[1:], wall_s)
    length = t - begins
    idle: Floats = np.add.reduceat((1.0 - busy) * length, first) / np.add.reduceat(length, first)
    return starts, ends, idle
