"""Batch planning: what to assemble next, groups of batches from a cursor. Pure.

A cursor is the position of the whole job: the epoch, and the next global position in it. A task is a
group of batches of one rank, with the cursor that holds after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.load.ordering.draw import Draw
from stoker.load.ordering.packing import Packed, pack_best_fit
from stoker.load.ordering.rounds import Share
from stoker.mixing import Integers, key_of, permutation

# Positions drawn at once: too few waste time in Python, more would only delay the first batch.
_DRAWN = 8192

# Documents sorted by length together, and the run of them that stays together when batches are shuffled
# again. Fixed numbers: they belong to the order, which must not depend on the world.
SORTED, _RUN = 4096, 64

_PACKED = 4096  # documents packed together by best fit; beyond this the fill hardly improves


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """Where the job is: the next global position of an epoch. `row` counts rows inside a packed group."""

    epoch: int = 0
    position: int = 0
    row: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A group of batches to assemble: what is drawn, and the cursor after each batch."""

    draw: Draw
    after: Sequence[Cursor]
    real: npt.NDArray[np.bool_] | None = None
    packed: Packed | None = None
    epoch: int = 0

    @property
    def batches(self) -> int:
        return len(self.after)


class Planner(Protocol):
    """Plans one epoch at a time; called from the assembling thread."""

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]: ...
    def batches(self, cursor: Cursor) -> int | None: ...


class Ordered(Protocol):
    """Where positions lead."""

    @property
    def positions(self) -> int: ...
    def draw(self, rows: range, *, epoch: int) -> Draw: ...
    def deal(self, rows: range, *, epoch: int) -> Draw:
        """What a rank that has every `rows.step`-th row gets: from its own lanes."""


Lengths = Callable[[Draw], Integers]
Kept = Callable[
    [Draw, Packed, Cursor], npt.NDArray[np.bool_]
]  # which parts of a packed group are not left out


class Sorted:
    """An order in which documents of like length follow each other: stretches of positions are sorted by
    length, then cut into runs, and the runs shuffled."""

    def __init__(self, order: Ordered, lengths: Lengths, *, seed: int = 0) -> None:
        self._order, self._lengths, self._seed = order, lengths, seed

    @property
    def positions(self) -> int:
        return self._order.positions

    def draw(self, rows: range, *, epoch: int) -> Draw:
        return Draw.join(self._sorted(mine, epoch) for mine in _stretches(rows, SORTED))

    def deal(self, rows: range, *, epoch: int) -> Draw:
        """Rows of all lanes are sorted together: a rank takes what comes."""
        return self.draw(rows, epoch=epoch)

    def moved(self, position: int, *, epoch: int) -> int:
        """Where what lies at a position of the order comes here."""
        first = position - position % SORTED
        return first + int(np.flatnonzero(self._stretch(first, epoch)[1] == position - first)[0])

    def _sorted(self, rows: range, epoch: int) -> Draw:
        """These rows of the stretch they lie in."""
        first = rows.start - rows.start % SORTED
        drawn, stretch = self._stretch(first, epoch)
        return drawn.part(stretch[np.arange(rows.start, rows.stop, rows.step) - first])

    def _stretch(self, first: int, epoch: int) -> tuple[Draw, Integers]:
        drawn = self._order.draw(range(first, min(first + SORTED, self._order.positions)), epoch=epoch)
        by_length = np.argsort(self._lengths(drawn), kind="stable")
        runs = len(drawn) // _RUN
        shuffled = by_length[: runs * _RUN].reshape(-1, _RUN)[
            permutation(runs, key_of(self._seed, epoch, first))
        ]
        return drawn, np.concatenate([shuffled.reshape(-1), by_length[runs * _RUN :]])


class FixedPlanner:
    """One sample a row."""

    def __init__(self, order: Ordered, share: Share, *, tail: str = "drop") -> None:
        self._order, self._share, self._tail = order, share, tail

    def batches(self, cursor: Cursor) -> int:
        return self._share.batches(self._order.positions, start=cursor.position, tail=self._tail)

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]:
        total, done = self.batches(cursor), 0
        while done < total:
            # the first draw is one group only, so that the first batch is not kept waiting
            count = group() if not done else max(group(), _DRAWN // self._share.batch)
            count = min(count, total - done)
            drawn, real = self._draw(cursor, done, count)
            yield from self._groups(cursor, done, drawn, real, total, group)
            done += count

    def _draw(self, cursor: Cursor, done: int, count: int) -> tuple[Draw, npt.NDArray[np.bool_] | None]:
        rows = self._share.rows(cursor.position + done * self._share.global_batch, count)
        if self._tail == "drop":
            return self._order.deal(rows, epoch=cursor.epoch), None
        inside, *again = wrapped(rows, self._order.positions)
        more = (self._order.draw(turn, epoch=cursor.epoch) for turn in again)
        dealt = self._order.deal(inside, epoch=cursor.epoch)
        return Draw.join([dealt, *more]), np.arange(len(rows)) < len(inside)

    def _groups(
        self,
        cursor: Cursor,
        done: int,
        drawn: Draw,
        real: npt.NDArray[np.bool_] | None,
        total: int,
        group: Callable[[], int],
    ) -> Iterator[Task]:
        batch, at = self._share.batch, 0
        while at < len(drawn):
            rows = slice(at, min(len(drawn), at + max(1, group()) * batch))
            numbers = range(done + at // batch + 1, done + rows.stop // batch + 1)
            yield Task(
                draw=drawn if rows == slice(0, len(drawn)) else drawn.part(rows),
                after=_Afters(cursor, numbers, total, self._share.global_batch),
                real=None if real is None else real[rows],
                epoch=cursor.epoch,
            )
            at = rows.stop


def wrapped(rows: range, size: int) -> list[range]:
    """Positions beyond the end begin again at 0: the turns they make round [0, size)."""
    turns = []
    while rows:
        inside = len(range(rows.start, min(rows.stop, size), rows.step))
        turns.append(rows[:inside])
        rest = rows[inside:]
        rows = range(rest.start - size, rest.stop - size, rest.step)
    return turns


def _stretches(rows: range, size: int) -> Iterator[range]:
    """Rows cut where multiples of `size` are."""
    while rows:
        end = rows.start - rows.start % size + size
        inside = len(range(rows.start, min(rows.stop, end), rows.step))
        yield rows[:inside]
        rows = rows[inside:]


class _Afters(Sequence[Cursor]):
    """The cursors after some batches, made when asked for: making all of them took a tenth of the time."""

    def __init__(self, begin: Cursor, numbers: range, total: int, step: int) -> None:
        self._begin, self._numbers, self._total, self._step = begin, numbers, total, step

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: Any) -> Any:
        number = self._numbers[index]
        if number == self._total:
            return Cursor(epoch=self._begin.epoch + 1)
        return Cursor(epoch=self._begin.epoch, position=self._begin.position + number * self._step)


class BestFitPlanner:
    """Documents packed into rows without cutting. Every rank plans the packing of all documents, from
    their lengths alone, and reads only its own rows: so all agree where an epoch ends."""

    def __init__(
        self,
        order: Ordered,
        share: Share,
        *,
        seq_len: int,
        lengths: Lengths,
        seed: int = 0,
        kept: Kept | None = None,
    ) -> None:
        self._order, self._share, self._seq_len = order, share, seq_len
        self._lengths, self._seed, self._kept = lengths, seed, kept

    def batches(self, cursor: Cursor) -> int | None:
        return None  # known only once all documents have been packed

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]:
        whole, pending, rows = self._share.global_batch, list[_PackedGroup](), 0
        for packed in self._packed_groups(cursor):
            pending.append(packed)
            rows += packed.rows.rows
            while rows >= whole:
                count = min(rows // whole, max(1, group()))
                task, pending = self._cut(pending, count)
                rows -= count * whole
                yield task
        # fewer rows than a global batch are left: every rank drops them, and the next epoch begins

    def _packed_groups(self, cursor: Cursor) -> Iterator[_PackedGroup]:
        skip = cursor.row
        for first in range(cursor.position, self._order.positions, _PACKED):
            rows = range(first, min(first + _PACKED, self._order.positions))
            drawn = self._order.draw(rows, epoch=cursor.epoch)
            packed = pack_best_fit(self._lengths(drawn), room=self._seq_len)
            packed = packed.shuffled(key_of(self._seed, cursor.epoch, first))
            if self._kept:
                packed = packed.parts(self._kept(drawn, packed, Cursor(epoch=cursor.epoch, position=first)))
            begin = Cursor(epoch=cursor.epoch, position=first, row=skip)
            yield _PackedGroup(begin=begin, draw=drawn, rows=packed.rows_from(skip))
            skip = 0

    def _cut(self, pending: list[_PackedGroup], count: int) -> tuple[Task, list[_PackedGroup]]:
        """So many global batches off the front: this rank's rows of them, and what is left."""
        whole = self._share.global_batch
        first_row, first_item, after, parts = 0, 0, list[Cursor](), list[Packed]()
        for number, one in enumerate(pending):
            stop = min(one.rows.rows, count * whole - first_row)
            parts.append(one.rows.rows_between(0, stop).renumbered(first_row, first_item))
            while len(after) < count and (len(after) + 1) * whole <= first_row + stop:
                after.append(self._after(one, (len(after) + 1) * whole - first_row))
            used = pending[: number + 1]
            first_row, first_item = first_row + stop, first_item + len(one.draw)
            if first_row == count * whole:
                break
        left = [one.from_row(stop)] if stop < one.rows.rows else []
        mine = Packed.join(parts).every(self._share.world, self._share.rank)
        return _needed([one.draw for one in used], mine, after), left + pending[len(used) :]

    def _after(self, group: _PackedGroup, rows: int) -> Cursor:
        """Where the job is when so many rows of a group have been used."""
        begin = group.begin
        if rows < group.rows.rows:
            return Cursor(epoch=begin.epoch, position=begin.position, row=begin.row + rows)
        if begin.position + _PACKED >= self._order.positions:
            return Cursor(epoch=begin.epoch + 1)
        return Cursor(epoch=begin.epoch, position=begin.position + _PACKED)


@dataclass(frozen=True, kw_only=True, slots=True)
class _PackedGroup:
    """Rows of documents that were packed together, from a cursor on."""

    begin: Cursor
    draw: Draw
    rows: Packed

    def from_row(self, row: int) -> _PackedGroup:
        begin = Cursor(epoch=self.begin.epoch, position=self.begin.position, row=self.begin.row + row)
        return _PackedGroup(begin=begin, draw=self.draw, rows=self.rows.rows_from(row))


class EpochsPlanner:
    """A dataset that holds several epochs, each shuffled anew on disk: they take turns."""

    def __init__(self, planners: Sequence[Planner]) -> None:
        self._planners = planners

    def batches(self, cursor: Cursor) -> int | None:
        return self._planners[cursor.epoch % len(self._planners)].batches(cursor)

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]:
        return self._planners[cursor.epoch % len(self._planners)].epoch(cursor, group=group)


def _needed(draws: Sequence[Draw], packed: Packed, after: Sequence[Cursor]) -> Task:
    """The task, with only the documents its rows hold."""
    used = np.zeros(sum(map(len, draws)), bool)
    used[packed.item] = True
    where = np.cumsum(used) - 1
    drawn = Draw.join(draws).part(np.flatnonzero(used))
    return Task(draw=drawn, after=after, packed=packed.of_items(where[packed.item]))
