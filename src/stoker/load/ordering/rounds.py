"""Rounds: how lanes take turns, and which rank takes what of them.

Every lane comes once in a round, in an order that is drawn for the round. The draws are nested: with the
radices 2, 2, 2, 3 of 24 lanes, each two neighbouring positions hold an even and an odd lane, each four one
lane of each residue modulo 4, and so on. So any of 1, 2, 4, 8 and 24 ranks can share a round out by lanes,
each taking one of every so many positions, and all these worlds see the same global batches. What is in a
lane is drawn over the whole corpus, so the nesting shows nowhere in what is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np

from stoker.load.ordering.cut import Cut
from stoker.load.ordering.draw import Draw, Numbers
from stoker.mixing import Integers, key_of, mixed, permutations

# Orders of a round that are drawn for an epoch; each round takes one of them by a hash.
_DRAWN, _DRAWN_CELLS = 2048, 1 << 18

_ROUNDS, _PICK = 101, 102  # what a key is for


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's rows of each global batch."""

    rank: int
    world: int
    batch: int

    @property
    def global_batch(self) -> int:
        return self.world * self.batch

    def batches(self, positions: int, *, start: int = 0, tail: str = "drop") -> int:
        """Batches from `start` to the end of an epoch: the same number on every rank, always."""
        left = max(0, positions - start)
        return left // self.global_batch if tail == "drop" else -(-left // self.global_batch)

    def rows(self, start: int, count: int) -> range:
        """Positions of this rank's rows in `count` batches from global position `start`."""
        first = start + self.rank
        return range(first, first + count * self.global_batch, self.world)


class Lanes(Protocol):
    """Samples in lanes. Called from the thread that plans."""

    @property
    def cut(self) -> Cut: ...
    @property
    def seed(self) -> int: ...
    @property
    def positions(self) -> int: ...
    def lane_size(self, lane: int) -> int: ...
    def fill(
        self, lane: int, turns: range, *, epoch: int, numbers: Numbers, sample: Integers, chunk: Integers
    ) -> None:
        """Write what the lane comes to at these turns of an epoch."""


def draw_positions(source: Lanes, rows: range, *, epoch: int) -> Draw:
    """What lies at these positions of an epoch, whichever lanes they are in."""
    if not rows:
        return Draw.join(())
    turns, slots = np.divmod(np.arange(rows.start, rows.stop, rows.step), source.cut.lanes)
    lanes = _orders(source, range(int(turns[0]), int(turns[-1]) + 1), 1, 0, epoch)[turns - turns[0], slots]
    used = np.zeros(source.cut.lanes, bool)
    used[lanes] = True
    column, span = np.cumsum(used) - 1, range(int(turns[0]), int(turns[-1]) + 1)
    cells = column[lanes] * len(span) + (turns - span.start)
    return _gather(source, np.flatnonzero(used).tolist(), span, cells, epoch).part(slice(None))


def deal(source: Lanes, rows: range, *, epoch: int) -> Draw:
    """One rank's part of the global batches that these positions lie in, every `rows.step`-th being its own:
    the same samples in all, but each rank keeps to its own lanes."""
    world, lanes = rows.step, source.cut.lanes
    each = lanes // world
    if not source.cut.fits(world):
        return draw_positions(source, rows, epoch=epoch)
    first, rank = divmod(rows.start, world)
    span = range(first // each, -(-(first + len(rows)) // each))
    orders = _orders(source, span, world, rank, epoch)
    cells = orders // world * len(span) + np.arange(len(span))[:, None]
    mine = cells.reshape(-1)[first - span.start * each :][: len(rows)]
    if len(rows) < each:  # the first batch does not wait for the chunks of all lanes
        used = np.zeros(each, bool)
        used[mine // len(span)] = True
        few, column = np.flatnonzero(used), np.cumsum(used) - 1
        mine = column[mine // len(span)] * len(span) + mine % len(span)
        return _gather(source, (few * world + rank).tolist(), span, mine, epoch).part(slice(None))
    drawn = _gather(source, range(rank, lanes, world), span, mine, epoch)
    return drawn if len(mine) == cells.size else drawn.part(slice(None))


def lanes_at(source: Lanes, turn: int, *, epoch: int) -> list[int]:
    """The lanes of a round, in their order."""
    if turn >= source.positions // source.cut.lanes:
        return list(range(source.cut.lanes))
    picked = _picked(source, range(turn, turn + 1), epoch, _drawn(source.cut.lanes))
    lanes: list[int] = _drawn_rounds(source.cut, source.seed, epoch, picked)[0].tolist()
    return lanes


def lanes_of(source: Lanes, rows: range, *, epoch: int) -> Integers:
    """The lane that each of these positions in a row is in."""
    count = source.cut.lanes
    first = rows.start // count
    turns = range(first, -(-rows.stop // count))
    return _orders(source, turns, 1, 0, epoch).reshape(-1)[rows.start - first * count :][: len(rows)]


def _gather(source: Lanes, lanes: Sequence[int], turns: range, cells: Integers, epoch: int) -> Draw:
    """What some lanes come to at these turns; a cell is one of them, lane after lane."""
    samples, chunks = np.empty((2, len(lanes), len(turns)), np.int64)
    numbers = Numbers()
    for sample, chunk, lane in zip(samples, chunks, lanes, strict=True):
        here = range(turns.start, min(turns.stop, source.lane_size(lane)))
        source.fill(lane, here, epoch=epoch, numbers=numbers, sample=sample, chunk=chunk)
    return Draw(sample=np.take(samples, cells), chunk=np.take(chunks, cells), keys=numbers.keys)


def _orders(source: Lanes, turns: range, world: int, rank: int, epoch: int) -> Integers:
    """The lanes of a rank in the order of each round, as rows."""
    table = _lanes_of_rank(source.cut, source.seed, epoch, world, rank)
    orders: Integers = table[_picked(source, turns, epoch, len(table))]
    if turns and turns.stop > source.positions // source.cut.lanes:  # a last round that is not full: in order
        orders[-1] = np.arange(rank, source.cut.lanes, world)
    return orders


def _picked(source: Lanes, turns: range, epoch: int, drawn: int) -> Integers:
    """Which of the drawn orders each round takes."""
    key = np.uint64(key_of(source.seed, epoch, _PICK))
    rounds = np.arange(turns.start, turns.stop, dtype=np.uint64) ^ key
    picked: Integers = (mixed(rounds) % np.uint64(drawn)).astype(np.int64)
    return picked


@lru_cache(16)
def drawn_rounds(cut: Cut, seed: int, epoch: int) -> Integers:
    """Orders of the lanes in a round, as rows."""
    return _drawn_rounds(cut, seed, epoch, np.arange(_drawn(cut.lanes)))


def _drawn_rounds(cut: Cut, seed: int, epoch: int, which: Integers) -> Integers:
    """Some of these rows."""
    count = len(which)
    lanes, known = np.zeros((count, 1), np.int64), 1
    for level, radix in enumerate(cut.radices):
        # the next digit of a position is permuted anew for each lane that its digits so far lead to
        cells = (which[:, None] * known + np.arange(known)).reshape(-1).astype(np.uint64)
        keys = mixed(cells ^ np.uint64(key_of(seed, epoch, _ROUNDS, level)))
        digits = permutations(radix, keys).reshape(count, known, radix)
        drawn = np.take_along_axis(digits, lanes[:, :, None], axis=1)
        lanes = (lanes[:, None, :] + known * drawn.transpose(0, 2, 1)).reshape(count, known * radix)
        known *= radix
    return lanes


@lru_cache(16)
def _lanes_of_rank(cut: Cut, seed: int, epoch: int, world: int, rank: int) -> Integers:
    table = drawn_rounds(cut, seed, epoch)
    if world == 1:
        return table
    mine: Integers = table[table % world == rank].reshape(len(table), cut.lanes // world)
    return mine


def _drawn(lanes: int) -> int:
    return max(16, min(_DRAWN, _DRAWN_CELLS // lanes))
