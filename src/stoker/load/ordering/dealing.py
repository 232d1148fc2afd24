"""Which dataset of a blend comes at each position: as often as its schedule says, within one sample.

A dataset's next sample may come once its integral has passed the samples before it, and must come before
the integral reaches it. Of those that may, the one that must come first comes first (earliest deadline
first), for which there is always room, whatever the shares (Tijdeman's chairman assignment). What is dealt
depends on how often each dataset came before, and on nothing else: those counts are all that a position has
to keep.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.load.ordering.schedule import Floats, Schedule
from stoker.mixing import Integers
from stoker.native import native

_BLOCK = 1 << 14  # positions dealt at once
_BACK = (
    1 << 13
)  # how far before its position a plan may look: documents are sorted and packed 4,096 at a time
_KEPT = 16  # blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A schedule from a position on, where each dataset had come so often."""

    begin: int
    counts: tuple[int, ...]
    schedule: Schedule


@dataclass(frozen=True, kw_only=True)
class Dealing:
    """Stages one after the other. `known` are counts at positions on the way: those of a saved position."""

    stages: tuple[Stage, ...]
    known: tuple[int, tuple[int, ...]] | None = None
    _counts: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict, init=False, compare=False)
    _blocks: dict[tuple[int, int], Integers] = field(default_factory=dict, init=False, compare=False)

    @property
    def datasets(self) -> int:
        return len(self.stages[0].counts)

    def deal(self, positions: range) -> tuple[Integers, Integers]:
        """The dataset at each of these positions in a row, and how often it came before."""
        first = np.array(self.counts(positions.start), np.int64)
        dataset = self._dataset(positions)
        number = np.empty_like(dataset)
        for which in range(self.datasets):
            mine = np.flatnonzero(dataset == which)
            number[mine] = first[which] + np.arange(len(mine))
        return dataset, number

    def counts(self, position: int) -> tuple[int, ...]:
        """How often each dataset came before a position."""
        stage, block = self._stage(position), position // _BLOCK
        begin = max(block * _BLOCK, self.stages[stage].begin)
        counts = np.array(self._counts_at(stage, begin), np.int64)
        dealt = self._block(stage, block)[: position - begin]
        return tuple((counts + np.bincount(dealt, minlength=self.datasets)).tolist())

    def anchor(self, position: int) -> tuple[int, tuple[int, ...]]:
        """Counts from which a plan at this position can go on."""
        stage = self.stages[self._stage(position)]
        at = max(stage.begin, (position - _BACK) // _BLOCK * _BLOCK)
        return at, self.counts(at)

    def _stage(self, position: int) -> int:
        return max(0, bisect_right([stage.begin for stage in self.stages], position) - 1)

    def _dataset(self, positions: range) -> Integers:
        parts, at = [np.empty(0, np.int64)], positions.start
        while at < positions.stop:
            stage, block = self._stage(at), at // _BLOCK
            begin = max(block * _BLOCK, self.stages[stage].begin)
            later = self.stages[stage + 1].begin if stage + 1 < len(self.stages) else positions.stop
            stop = min(positions.stop, (block + 1) * _BLOCK, later)
            parts.append(self._block(stage, block)[at - begin : stop - begin])
            at = stop
        return np.concatenate(parts)

    def _block(self, stage: int, block: int) -> Integers:
        if (found := self._blocks.get((stage, block))) is None:
            begin = max(block * _BLOCK, self.stages[stage].begin)
            found = self._deal(stage, begin, (block + 1) * _BLOCK)
            while len(self._blocks) >= _KEPT:
                del self._blocks[next(iter(self._blocks))]
            self._blocks[stage, block] = found
        return found

    def _counts_at(self, stage: int, begin: int) -> tuple[int, ...]:
        """At the beginning of a block: dealt through from the last one known before it."""
        known = self._counts.setdefault(stage, self._first_counts(stage))
        if begin in known:
            return known[begin]
        at = max(one for one in known if one < begin)
        while at < begin:
            stop = (at // _BLOCK + 1) * _BLOCK
            dealt = np.bincount(self._deal(stage, at, stop), minlength=self.datasets)
            known[stop] = tuple((np.array(known[at]) + dealt).tolist())
            at = stop
        return known[begin]

    def _first_counts(self, stage: int) -> dict[int, tuple[int, ...]]:
        first = {self.stages[stage].begin: self.stages[stage].counts}
        if self.known and self._stage(self.known[0]) == stage:
            first[self.known[0]] = self.known[1]
        return first

    def _deal(self, stage: int, begin: int, stop: int) -> Integers:
        """From a position whose counts are known on."""
        here = self.stages[stage]
        came = np.array(self._counts_at(stage, begin), np.int64) - here.counts
        at = np.arange(begin, stop + 1)
        belong = here.schedule.integral(at) - here.schedule.integral([here.begin])
        dues = []
        far = here.schedule.due(
            np.floor(belong[:, -1]) + 1 + here.schedule.integral([here.begin])[:, 0], after=stop
        )
        for which, counts in enumerate(belong):
            units = np.arange(came[which] + 1, max(came[which], int(counts[-1])) + 1)
            dues.append(np.append(np.searchsorted(counts, units), max(0, far[which] - begin)))
        return earliest_deadline_first(np.ascontiguousarray(belong), came, dues)


def earliest_deadline_first(belong: Floats, came: Integers, dues: Sequence[Integers]) -> Integers:
    """The dataset of each slot. `belong[d, p]` samples of a dataset belong before slot p, `came` so many did
    before the first; `dues[d]` are the slots before which its next ones are to come."""
    module = native("load._pack")
    if module is None:
        return earliest_in_python(belong, came, dues)
    slots, due = np.empty(belong.shape[1] - 1, np.int64), np.concatenate(dues).astype(np.int64)
    ends = np.cumsum([len(one) for one in dues]).astype(np.int64)
    begins, counts = ends - np.array([len(one) for one in dues]), np.array(came, np.int64)
    arrays: list[Any] = [belong, counts, due, begins, ends, slots]
    module.earliest(len(dues), len(slots), *(array.ctypes.data for array in arrays))
    return slots


def earliest_in_python(belong: Floats, came: Integers, dues: Sequence[Integers]) -> Integers:
    counts, first = came.tolist(), came.tolist()
    due, rows = [one.tolist() for one in dues], belong[:, 1:].T.tolist()
    slots = np.empty(len(rows), np.int64)
    for slot, row in enumerate(rows):
        may = [d for d, belongs in enumerate(row) if belongs > counts[d]] or range(len(row))
        chosen = min(may, key=lambda d: due[d][min(counts[d] - first[d], len(due[d]) - 1)])
        counts[chosen] += 1
        slots[slot] = chosen
    return slots
