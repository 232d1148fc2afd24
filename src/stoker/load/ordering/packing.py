"""Bin packing: documents into rows, best fit, decreasing; in C where the extension was built, or Python."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from stoker.mixing import Integers, permutation
from stoker.native import native


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Parts of documents in rows: part i is tokens `start:start+length` of document `item`, at `column`
    of `row`. Sorted by row, then column."""

    rows: int
    item: Integers
    start: Integers
    length: Integers
    row: Integers
    column: Integers

    def rows_from(self, first: int) -> Packed:
        return self.rows_between(first, self.rows)

    def rows_between(self, first: int, stop: int) -> Packed:
        kept = self.parts((self.row >= first) & (self.row < stop))
        return replace(kept, rows=stop - first, row=kept.row - first)

    def every(self, step: int, offset: int) -> Packed:
        """Rows offset, offset + step, offset + 2 steps..."""
        kept = self.parts(self.row % step == offset)
        return replace(kept, rows=self.rows // step, row=kept.row // step)

    def renumbered(self, row: int, item: int) -> Packed:
        return replace(self, row=self.row + row, item=self.item + item)

    def of_items(self, item: Integers) -> Packed:
        return replace(self, item=item)

    def shuffled(self, key: int) -> Packed:
        """The rows in another order: best fit leaves long documents first."""
        return _sorted(replace(self, row=permutation(self.rows, key)[self.row]))

    def parts(self, keep: npt.NDArray[np.bool_]) -> Packed:
        """Some of the parts; rows close up where others are gone."""
        return Packed(
            rows=self.rows,
            item=self.item[keep],
            start=self.start[keep],
            length=self.length[keep],
            row=self.row[keep],
            column=self.column[keep],
        )

    @staticmethod
    def join(parts: Sequence[Packed]) -> Packed:
        """Rows of several, one after the other; their row numbers already follow each other."""
        return Packed(
            rows=sum(part.rows for part in parts),
            item=np.concatenate([part.item for part in parts]),
            start=np.concatenate([part.start for part in parts]),
            length=np.concatenate([part.length for part in parts]),
            row=np.concatenate([part.row for part in parts]),
            column=np.concatenate([part.column for part in parts]),
        )


def pack_best_fit(lengths: Integers, *, room: int) -> Packed:
    """Rows of `room` tokens; only a document longer than a row is cut, into whole rows and a rest."""
    item, start, length = _cut_long(lengths, room)
    by_length = np.argsort(-length, kind="stable")
    row, column = np.empty((2, len(length)), np.int64)
    rows, row[by_length], column[by_length] = best_fit(length[by_length], room=room)
    return _sorted(Packed(rows=rows, item=item, start=start, length=length, row=row, column=column))


def best_fit(lengths: Integers, *, room: int) -> tuple[int, Integers, Integers]:
    """Each length, from the longest on, goes to the row with the least room that takes it: how many rows it
    takes, and the row and column of each. Of rows with the same room the one that had it first is used."""
    module = native("load._pack")
    if module is None:
        return best_fit_in_python(lengths, room=room)
    lengths = np.ascontiguousarray(lengths, np.int64)
    row, column = np.empty((2, len(lengths)), np.int64)
    rows = module.best_fit(len(lengths), room, lengths.ctypes.data, row.ctypes.data, column.ctypes.data)
    return rows, row, column


def best_fit_in_python(lengths: Integers, *, room: int) -> tuple[int, Integers, Integers]:
    row, column, count = np.empty_like(lengths), np.empty_like(lengths), 0
    rooms: list[int] = []  # sorted
    rows: dict[int, deque[int]] = {}
    for number, length in enumerate(lengths.tolist()):
        at = bisect_left(rooms, length)
        left = rooms[at] if at < len(rooms) else room
        if at == len(rooms):
            row[number], count = count, count + 1
        else:
            row[number] = rows[left].popleft()
            if not rows[left]:
                del rooms[at], rows[left]
        column[number] = room - left
        if left > length:
            if left - length not in rows:
                insort(rooms, left - length)
            rows.setdefault(left - length, deque()).append(int(row[number]))
    return count, row, column


def _cut_long(lengths: Integers, room: int) -> tuple[Integers, Integers, Integers]:
    parts = np.maximum(-(-lengths // room), np.minimum(lengths, 1))
    item = np.repeat(np.arange(len(lengths)), parts)
    number = np.arange(len(item)) - np.repeat(np.cumsum(parts) - parts, parts)
    start = number * room
    return item, start, np.minimum(lengths[item] - start, room)


def _sorted(packed: Packed) -> Packed:
    by_place = np.lexsort((packed.column, packed.row))
    return Packed(
        rows=packed.rows,
        item=packed.item[by_place],
        start=packed.start[by_place],
        length=packed.length[by_place],
        row=packed.row[by_place],
        column=packed.column[by_place],
    )
