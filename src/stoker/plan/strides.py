"""Fast-forward: stretches in which one save interval is like the one before are taken in one stride.

Exact, not approximate: rates depend on which buffers are full or empty, so an interval that began and went
like the last one is followed by more of them: until an epoch ends, a buffer meets its bound, a node is lost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stoker.plan.fluid import Job
from stoker.plan.scene import Floats


@dataclass(frozen=True, slots=True)
class _Mark:
    """A job at the beginning of a save."""

    values: Floats  # time, bytes used, missed and read, saturated seconds, bytes in hand of each class
    epoch: int
    again: bool  # work that is done once more
    segments: int


class Strides:
    """Asked at the beginning of each save; remembers the last two."""

    def __init__(self) -> None:
        self._last: _Mark | None = None
        self._change: Floats | None = None

    def save_begun(self, job: Job) -> None:
        mark = _mark(job)
        change = _change(self._last, mark)
        if change is not None and self._change is not None and _alike(change, self._change):
            count = _count(job, change)
            if count >= 1 and self._last is not None:
                _leap(job, change, count=count, since=self._last.segments)
                mark = _mark(job)
        self._last, self._change = mark, change
        job.lowest, job.highest = job.in_hand.copy(), job.in_hand.copy()


def _mark(job: Job) -> _Mark:
    numbers = (job.now, job.used, job.missed, job.store_bytes, job.saturated_s)
    return _Mark(
        np.concatenate([numbers, job.in_hand]), job.epoch, job.used < job.furthest, len(job.segments)
    )


def _change(last: _Mark | None, now: _Mark) -> Floats | None:
    if last is None or (last.epoch, last.again) != (now.epoch, now.again):
        return None
    return now.values - last.values


def _alike(one: Floats, other: Floats) -> bool:
    scale = max(float(np.abs(one[1:]).max()), 1.0)
    return bool(np.allclose(one, other, rtol=1e-6, atol=1e-9 * scale))


def _count(job: Job, change: Floats) -> int:
    """Intervals that are sure to be like this one; one is left to be played."""
    drift = change[5:]
    limits = [
        (job.cluster.share * (job.epoch + 1) - job.used, change[1]),
        (job.total - job.used, change[1]),
        (job.next_loss - job.now, change[0]),
        (job.furthest - job.used if job.used < job.furthest else math.inf, change[1]),
    ]
    settled = np.abs(drift) <= 1e-9 * job.cluster.share
    fetched = change[2] + drift > 1e-9 * job.cluster.share
    limits += zip(job.to_land()[fetched], (change[2] + drift)[fetched], strict=True)
    limits += zip((job.ahead() - job.highest)[fetched & ~settled], drift[fetched & ~settled], strict=True)
    limits += zip(job.lowest[fetched & ~settled], -drift[fetched & ~settled], strict=True)
    whole = min(amount / step for amount, step in limits if step > 0)
    return int(whole) - 1 if math.isfinite(whole) else 0


def _leap(job: Job, change: Floats, *, count: int, since: int) -> None:
    seconds = count * float(change[0])
    ends = np.array([job.segments[since - 1][0], *(end for end, _, _ in job.segments[since:])])
    lengths = np.diff(ends)
    idle = lengths @ np.array([row for _, row, _ in job.segments[since:]]) / lengths.sum()
    use = lengths @ np.array([use for _, _, use in job.segments[since:]]) / lengths.sum()
    job.shift(seconds, count * change[1:])
    job.segments.append((job.now, tuple(idle.tolist()), float(use)))
