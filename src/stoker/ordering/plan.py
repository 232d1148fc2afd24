"""What to assemble next: pure planning of groups of batches from a cursor.

A cursor is the position of the whole job: the epoch, and the next global position in it. A task is a
group of batches of one rank, with the cursor that holds after each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.mixing import Integers, key_of, permutation
from stoker.ordering.blend import Blend
from stoker.ordering.order import Draw, Order, Share
from stoker.ordering.packing import Packed, pack_best_fit

# Positions drawn at once: too few waste time in Python, more would only delay the first batch.
_DRAWN = 8192

# Documents sorted by length together, and the run of them that stays together when batches are shuffled
# again. Fixed numbers: they belong to the order, which must not depend on the world.
_SORTED, _RUN = 4096, 64

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

    @property
    def batches(self) -> int:
        return len(self.after)


class Planner(Protocol):
    """Plans one epoch at a time; called from the assembling thread."""

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]: ...
    def batches(self, cursor: Cursor) -> int | None: ...


Lengths = Callable[[Integers], Integers]


class FixedPlanner:
    """One sample a row. With `lengths`, rows of similar length meet in a batch."""

    def __init__(
        self, order: Order | Blend, share: Share, *, tail: str = "drop", lengths: Lengths | None = None
    ) -> None:
        self._order, self._share, self._tail, self._lengths = order, share, tail, lengths

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
            return self._draw_rows(rows, cursor.epoch), None
        turns = wrapped(rows, self._order.positions)
        drawn = Draw.join(self._draw_rows(turn, cursor.epoch) for turn in turns)
        return drawn, np.arange(len(rows)) < len(turns[0])

    def _draw_rows(self, rows: range, epoch: int) -> Draw:
        return self._by_length(rows, epoch) if self._lengths else self._order.draw(rows, epoch=epoch)

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
            )
            at = rows.stop

    def _by_length(self, rows: range, epoch: int) -> Draw:
        """Stretches of positions are sorted by length, then cut into runs, and the runs shuffled."""
        return Draw.join(self._sorted(mine, epoch) for mine in _stretches(rows, _SORTED))

    def _sorted(self, rows: range, epoch: int) -> Draw:
        """These rows of the stretch they lie in."""
        assert self._lengths is not None
        first = rows.start - rows.start % _SORTED
        drawn = self._order.draw(range(first, min(first + _SORTED, self._order.positions)), epoch=epoch)
        by_length = np.argsort(self._lengths(drawn.sample), kind="stable")
        runs = len(drawn) // _RUN
        shuffled = by_length[: runs * _RUN].reshape(-1, _RUN)[permutation(runs, key_of(epoch, first))]
        stretch = np.concatenate([shuffled.reshape(-1), by_length[runs * _RUN :]])
        return drawn.part(stretch[np.arange(rows.start, rows.stop, rows.step) - first])


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

    def __init__(self, order: Order | Blend, share: Share, *, seq_len: int, lengths: Lengths) -> None:
        self._order, self._share, self._seq_len, self._lengths = order, share, seq_len, lengths

    def batches(self, cursor: Cursor) -> int | None:
        return None  # known only once all documents have been packed

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]:
        whole = self._share.global_batch
        pending: list[tuple[Cursor, Draw, Packed]] = []
        rows = 0
        for after, drawn, packed in self._packed_groups(cursor):
            pending.append((after, drawn, packed))
            rows += packed.rows
            while rows >= whole:
                task, pending = self._cut(pending, whole)
                rows -= whole
                yield task
        # fewer rows than a global batch are left: every rank drops them, and the next epoch begins

    def _packed_groups(self, cursor: Cursor) -> Iterator[tuple[Cursor, Draw, Packed]]:
        skip = cursor.row
        for first in range(cursor.position, self._order.positions, _PACKED):
            rows = range(first, min(first + _PACKED, self._order.positions))
            drawn = self._order.draw(rows, epoch=cursor.epoch)
            packed = pack_best_fit(self._lengths(drawn.sample), room=self._seq_len)
            packed = packed.shuffled(key_of(cursor.epoch, first))
            yield Cursor(epoch=cursor.epoch, position=first, row=skip), drawn, packed.rows_from(skip)
            skip = 0

    def _cut(
        self, pending: list[tuple[Cursor, Draw, Packed]], count: int
    ) -> tuple[Task, list[tuple[Cursor, Draw, Packed]]]:
        """One global batch off the front: this rank's rows of it, and what is left."""
        draws: list[Draw] = []
        parts: list[Packed] = []
        taken = 0
        rest = list(pending)
        while taken < count:
            at, drawn, packed = rest.pop(0)
            use = min(packed.rows, count - taken)
            parts.append(packed.rows_between(0, use).renumbered(taken, sum(len(d) for d in draws)))
            draws.append(drawn)
            taken += use
            if use < packed.rows:
                left = Cursor(epoch=at.epoch, position=at.position, row=at.row + use)
                rest.insert(0, (left, drawn, packed.rows_from(use)))
            elif not rest:
                at_next = Cursor(epoch=at.epoch, position=at.position + _PACKED)
        after = rest[0][0] if rest else at_next
        if after.position >= self._order.positions:
            after = Cursor(epoch=after.epoch + 1)
        mine = Packed.join(parts).every(self._share.world, self._share.rank)
        return _needed(draws, mine, after), rest


class EpochsPlanner:
    """A dataset that holds several epochs, each shuffled anew on disk: they take turns."""

    def __init__(self, planners: Sequence[Planner]) -> None:
        self._planners = planners

    def batches(self, cursor: Cursor) -> int | None:
        return self._planners[cursor.epoch % len(self._planners)].batches(cursor)

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]:
        return self._planners[cursor.epoch % len(self._planners)].epoch(cursor, group=group)


def _needed(draws: list[Draw], packed: Packed, after: Cursor) -> Task:
    """The task, with only the documents its rows hold."""
    used, where = np.unique(packed.item, return_inverse=True)
    return Task(draw=Draw.join(draws).part(used), after=(after,), packed=packed.of_items(where))
