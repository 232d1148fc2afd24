"""Lanes cut anew: what is left of an epoch, shared out among other ranks.

The rest of the old lanes is laid end to end and cut into as many spans as the new world wants lanes. A span
goes through whole stretches of old lanes, so chunks are still read once, but for those at its ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import numpy as np

from stoker.load.ordering.cut import Cut
from stoker.load.ordering.draw import Draw, Numbers
from stoker.load.ordering.rounds import Lanes, deal, draw_positions, lanes_at
from stoker.mixing import Integers, key_of

_RECUT = 201  # what a key is for


class Cuttable(Lanes, Protocol):
    """Lanes of several epochs."""

    def draw(self, rows: range, *, epoch: int) -> Draw: ...
    def deal(self, rows: range, *, epoch: int) -> Draw: ...
    def recut(self, cut: Cut, *, epoch: int) -> Cuttable:
        """The whole of an epoch in other lanes."""

    def stretches(self, lane: int, turns: range, *, epoch: int) -> Iterator[tuple[int, int, int]]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Spans:
    """The rest of an epoch in other lanes: `sizes` of them, if they are not to be equal. Positions count from
    where it was cut. What was cut before is cut again as pieces of the first lanes, however often: a job that
    changed its ranks a hundred times goes on as fast as one that did once."""

    base: InitVar[Cuttable]
    epoch: InitVar[int]
    position: InitVar[int]
    cut: Cut
    sizes: Sequence[int] = ()
    root: Cuttable = field(init=False)  # what was never cut
    seed: int = field(init=False)
    positions: int = field(init=False)
    _pieces: Pieces = field(init=False)
    _starts: Sequence[int] = field(init=False)  # where each new lane starts, all pieces laid end to end

    def __post_init__(self, base: Cuttable, epoch: int, position: int) -> None:
        left = _left_of(base, position, epoch=epoch)
        old = sorted(range(len(left)), key=lambda lane: (base.cut.node_of(lane), lane))
        found = {
            "root": base.root if isinstance(base, Spans) else base,
            "seed": key_of(base.seed, _RECUT, position),
            "positions": base.positions - position,
            "_pieces": Pieces.join([left[lane] for lane in old]),
        }
        for name, value in found.items():
            object.__setattr__(self, name, value)
        new = sorted(range(self.cut.lanes), key=lambda lane: (self.cut.node_of(lane), lane))
        starts, at = [0] * self.cut.lanes, 0
        for lane in new:
            starts[lane] = at
            at += self.lane_size(lane)
        object.__setattr__(self, "_starts", starts)

    def draw(self, rows: range, *, epoch: int) -> Draw:
        return draw_positions(self, rows, epoch=epoch)

    def deal(self, rows: range, *, epoch: int) -> Draw:
        return deal(self, rows, epoch=epoch)

    def recut(self, cut: Cut, *, epoch: int) -> Spans:
        return Spans(base=self, epoch=epoch, position=0, cut=cut)

    def lane_size(self, lane: int) -> int:
        if self.sizes:
            return self.sizes[lane]
        size, left = divmod(self.positions, self.cut.lanes)
        return size + (lane < left)

    def pieces(self, lane: int, turns: range) -> Pieces:
        """What these turns of a lane are, of the lanes that were never cut."""
        start = self._starts[lane]
        return self._pieces.between(start + turns.start, start + turns.stop)

    def place_of(self, lane: int, turn: int) -> tuple[int, int] | None:
        """Where a turn of a lane that was never cut comes: lane and turn, or None if it had come before."""
        all_of = self._pieces
        (held,) = np.nonzero((all_of.lane == lane) & (all_of.start <= turn) & (turn < all_of.stop))
        if not len(held):
            return None
        at = int(all_of.ends[held[0]] - all_of.stop[held[0]]) + turn
        start, new = max(
            (start, new) for new, start in enumerate(self._starts) if start <= at and self.lane_size(new)
        )
        return new, at - start

    def fill(
        self, lane: int, turns: range, *, epoch: int, numbers: Numbers, sample: Integers, chunk: Integers
    ) -> None:
        root, at = self.root, 0
        for old, there in self.pieces(lane, turns):
            here = slice(at, at := at + len(there))
            root.fill(old, there, epoch=epoch, numbers=numbers, sample=sample[here], chunk=chunk[here])

    def stretches(self, lane: int, turns: range, *, epoch: int) -> Iterator[tuple[int, int, int]]:
        root, at = self.root, turns.start
        for old, there in self.pieces(lane, turns):
            for turn, first, stop in root.stretches(old, there, epoch=epoch):
                yield turn - there.start + at, first, stop
            at += len(there)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """Turns `start:stop` of lanes, laid end to end. Arrays: jobs that were cut often have many."""

    lane: Integers
    start: Integers
    stop: Integers
    ends: Integers = field(init=False)  # of each piece, counted from the first turn of all

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.cumsum(self.stop - self.start))

    def __iter__(self) -> Iterator[tuple[int, range]]:
        turns = map(range, self.start.tolist(), self.stop.tolist())
        return zip(self.lane.tolist(), turns, strict=True)

    def between(self, begin: int, end: int) -> Pieces:
        """Those of so many turns from the first one on."""
        edges = np.searchsorted(self.ends, (begin, end))
        some = slice(int(edges[0]), int(edges[1]) + 1)
        lane, start, stop, ends = self.lane[some], self.start[some], self.stop[some], self.ends[some]
        first, last = np.maximum(start, stop - (ends - begin)), np.minimum(stop, stop - (ends - end))
        kept = last > first
        return Pieces(lane=lane[kept], start=first[kept], stop=last[kept])

    @staticmethod
    def join(some: Sequence[Pieces]) -> Pieces:
        return Pieces(
            lane=np.concatenate([one.lane for one in some]),
            start=np.concatenate([one.start for one in some]),
            stop=np.concatenate([one.stop for one in some]),
        )


def _left_of(base: Cuttable, position: int, *, epoch: int) -> list[Pieces]:
    """What each lane has before it at a position."""
    turns, left = divmod(position, base.cut.lanes)
    gone = [turns] * base.cut.lanes
    for lane in lanes_at(base, turns, epoch=epoch)[:left] if left else ():
        gone[lane] += 1
    rest = [range(min(done, size := base.lane_size(lane)), size) for lane, done in enumerate(gone)]
    if isinstance(base, Spans):
        return [base.pieces(lane, turns) for lane, turns in enumerate(rest)]
    return [
        Pieces(lane=np.array([lane]), start=np.array([one.start]), stop=np.array([one.stop]))
        for lane, one in enumerate(rest)
    ]


class Elastic:
    """Lanes that were cut anew on the way, for jobs that went on with other numbers of ranks."""

    def __init__(self, base: Cuttable, cut: Cut) -> None:
        self.base, self._cut = base, cut
        self._made: tuple[int, list[tuple[int, Cuttable]]] = (-1, [])

    @property
    def positions(self) -> int:
        return self.base.positions

    def draw(self, rows: range, *, epoch: int) -> Draw:
        start, lanes = self.at(rows.start, epoch=epoch)
        return lanes.draw(_moved(rows, start), epoch=epoch)

    def deal(self, rows: range, *, epoch: int) -> Draw:
        start, lanes = self.at(rows.start, epoch=epoch)
        return lanes.deal(_moved(rows, start), epoch=epoch)

    def at(self, position: int, *, epoch: int) -> tuple[int, Cuttable]:
        """The lanes that a position is in, and where they begin."""
        return next(one for one in reversed(self.stages(epoch)) if one[0] <= position)

    def begins_round(self, position: int, ranks: int, *, epoch: int) -> bool:
        """Whether so many ranks, going on here with the lanes as they are, can each keep to their own: those
        before them have to have taken whole rounds of ranks."""
        return (position - self.at(position, epoch=epoch)[0]) % ranks == 0

    def stages(self, epoch: int) -> list[tuple[int, Cuttable]]:
        """All lanes that an epoch is in, one after the other, and where they begin."""
        if self._made[0] != epoch:
            self._made = epoch, list(self._make(epoch))
        return self._made[1]

    def _make(self, epoch: int) -> Iterator[tuple[int, Cuttable]]:
        first, *later = self._cut.cuts_of(epoch)
        lanes = self.base if first.cut == self.base.cut else self.base.recut(first.cut, epoch=epoch)
        yield 0, lanes
        start = 0
        for recut in later:
            position = recut.position - start
            lanes = Spans(base=lanes, epoch=epoch, position=position, cut=recut.cut)
            start = recut.position
            yield start, lanes


def _moved(rows: range, start: int) -> range:
    return range(rows.start - start, rows.stop - start, rows.step)
