"""The GPU's side of the ledger: how long the cards were busy, and what the host did while they were idle.

Each reading of a card tells what part of the time since the one before it was busy. What the host did in that
stretch is known from the timeline, so the idle part is shared out among those states: to those in which the
host gives a card nothing to do first, then to launching kernels, then to waiting for the card itself, which
is idle only when the wait is over. Where a profiler saw every event of the card, nothing needs to be shared
out. Busy and idle sum to the wall time, as the loop's own states do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stoker.diagnose.activity import busy_of
from stoker.diagnose.timeline import STATES, Timeline
from stoker.recording import Floats, GpuRecord, RankRecord, Recording

# Who is asked first why a card is idle; compute is the host launching kernels.
_ORDER = (
    ("startup", "data", "checkpoint", "stalled", "unattributed", "evaluation", "copy"),
    ("compute", "collective"),
    ("sync",),
)


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
        if lines and len(gpu.samples.t) and "util" in gpu.samples.columns
    ]
    if not pairs or recording.wall_s <= 0:
        return None
    each = [_of_card(gpu, line, recording.wall_s) for gpu, line in pairs]
    return _told(each)


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
    t, util = gpu.samples.t, gpu.samples.columns["util"] / 100
    known = np.isfinite(util) & (t > 0) & (t <= wall_s)
    if not known.any():
        return np.zeros(len(STATES))
    ends = np.append(t[known][:-1], wall_s)
    starts = np.concatenate([[0.0], ends[:-1]])
    spent = np.stack([line.within(state, starts, ends) for state in STATES])
    left = (1.0 - np.clip(util[known], 0.0, 1.0)) * (ends - starts)
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
