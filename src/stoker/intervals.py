"""Intervals of time as sorted columns: merged, intersected, cut out of one another."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Intervals(NamedTuple):
    """From `start[i]` to `end[i]`, sorted, none touching another."""

    start: Floats
    end: Floats

    @property
    def seconds(self) -> float:
        return float((self.end - self.start).sum())

    def within(self, starts: Floats, ends: Floats) -> Floats:
        """Seconds of these inside each of the given windows."""
        if not len(self.start):
            return np.zeros(len(starts))
        inside: Floats = self._until(ends) - self._until(starts)
        return inside

    def clipped(self, start: float, end: float) -> Intervals:
        """The part between two moments."""
        begins, ends = np.maximum(self.start, start), np.minimum(self.end, end)
        kept = ends > begins
        return Intervals(begins[kept], ends[kept])

    def gaps(self, start: float, end: float) -> Intervals:
        """What is left between two moments."""
        mine = self.clipped(start, end)
        begins = np.concatenate([[start], mine.end])
        ends = np.concatenate([mine.start, [end]])
        kept = ends > begins
        return Intervals(begins[kept], ends[kept])

    def shared(self, other: Intervals) -> float:
        """Seconds that lie in both."""
        return float(other.within(self.start, self.end).sum())

    def without(self, other: Intervals) -> Intervals:
        """The parts that no interval of the other covers."""
        if not len(self.start):
            return self
        free = other.gaps(float(self.start[0]), float(self.end[-1]))
        return merged(*_crossed(self, free))

    def _until(self, t: Floats) -> Floats:
        """Seconds of these before each moment."""
        sums = np.concatenate([[0.0], np.cumsum(self.end - self.start)])
        at = np.searchsorted(self.start, t, side="right")
        before = np.maximum(at - 1, 0)
        open_s = np.where(at > 0, np.clip(t, None, self.end[before]) - self.start[before], 0.0)
        found: Floats = np.where(at > 0, sums[before] + open_s, 0.0)
        return found


def merged(start: Floats, end: Floats, *, closing_s: float = 0.0) -> Intervals:
    """Their union; gaps up to `closing_s` are closed."""
    kept = end > start
    start, end = start[kept], end[kept]
    if not len(start):
        return Intervals(np.zeros(0), np.zeros(0))
    order = np.argsort(start, kind="stable")
    start, end = start[order], np.maximum.accumulate(end[order])
    fresh = np.concatenate([[True], start[1:] > end[:-1] + closing_s])
    last = np.concatenate([np.flatnonzero(fresh)[1:] - 1, [len(start) - 1]])
    return Intervals(start[fresh], end[last])


def _crossed(one: Intervals, other: Intervals) -> tuple[Floats, Floats]:
    """Start and end of every piece that lies in both."""
    first = np.searchsorted(other.end, one.start, side="right")
    last = np.searchsorted(other.start, one.end, side="left")
    counts = np.maximum(last - first, 0)
    mine = np.repeat(np.arange(len(one.start)), counts)
    offset = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    theirs = np.repeat(first, counts) + offset
    return np.maximum(one.start[mine], other.start[theirs]), np.minimum(one.end[mine], other.end[theirs])
