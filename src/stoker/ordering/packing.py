"""Packing documents into rows: best fit, decreasing, by length classes.

Documents of the same length are interchangeable, and so are rows with the same room left. So the loop
runs over lengths, not documents: each turn places a whole class of documents into a whole class of rows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stoker.mixing import Integers, permutation


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
        kept = self._kept((self.row >= first) & (self.row < stop))
        return replace(kept, rows=stop - first, row=kept.row - first)

    def every(self, step: int, offset: int) -> Packed:
        """Rows offset, offset + step, offset + 2 steps..."""
        kept = self._kept(self.row % step == offset)
        return replace(kept, rows=self.rows // step, row=kept.row // step)

    def renumbered(self, row: int, item: int) -> Packed:
        return replace(self, row=self.row + row, item=self.item + item)

    def of_items(self, item: Integers) -> Packed:
        return replace(self, item=item)

    def shuffled(self, key: int) -> Packed:
        """The rows in another order: best fit leaves long documents first."""
        return _sorted(replace(self, row=permutation(self.rows, key)[self.row]))

    def _kept(self, keep: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Packed:
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
    row, column = np.empty_like(length), np.empty_like(length)
    rows = _Rows(room)
    by_length = np.argsort(-length, kind="stable")
    sizes, counts = np.unique(-length, return_counts=True)
    at = 0
    for size, count in zip((-sizes).tolist(), counts.tolist(), strict=True):
        parts = by_length[at : at + count]
        at += count
        while len(parts):
            left, places = rows.best_fit(size, len(parts))
            row[parts[: len(places)]], column[parts[: len(places)]] = places, room - left
            parts = parts[len(places) :]
    return _sorted(Packed(rows=rows.count, item=item, start=start, length=length, row=row, column=column))


class _Rows:
    """Rows by the room they have left."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._left: list[int] = []  # sorted
        self._rows: dict[int, Integers] = {}
        self.count = 0

    def best_fit(self, size: int, wanted: int) -> tuple[int, Integers]:
        """The fullest rows that still take `size` tokens, at most `wanted` of them, and their room."""
        at = bisect_left(self._left, size)
        if at == len(self._left):
            self._open(-(-wanted // (self._room // size)))
        left = self._left[at]
        rows = self._rows.pop(left)
        del self._left[at]
        self._put(left, rows[wanted:])
        self._put(left - size, rows[:wanted])
        return left, rows[:wanted]

    def _open(self, count: int) -> None:
        self._put(self._room, np.arange(self.count, self.count + count))
        self.count += count

    def _put(self, left: int, rows: Integers) -> None:
        if not len(rows) or not left:
            return
        if left in self._rows:
            self._rows[left] = np.concatenate([self._rows[left], rows])
        else:
            self._rows[left] = rows
            insort(self._left, left)


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
