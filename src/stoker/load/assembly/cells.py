"""Rows filled with parts of documents: in C where the extension was built, else with numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from stoker.load.assembly.batch import IGNORED, ragged
from stoker.load.assembly.rows import Array
from stoker.mixing import Integers
from stoker.native import native

_MODES = {"": 0, "next": 1, "same": 2}
_COLUMNS = ("input_ids", "labels", "document_ids", "position_ids", "attention_mask")
_INT64: np.dtype[Any] = np.dtype(np.int64)

Empty = Callable[[str, int, "np.dtype[Any]"], Array]  # room for so many cells of a column

# parts `first:stop` of what is laid, and the rows and columns of the array they make
Tile = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Laid:
    """Parts of documents laid into rows, sorted by row, each row without gaps from its first column on. A
    part is `length` tokens from `place` of one of the `sources`, which has `known` of its document; `row`
    counts in its tile."""

    sources: Sequence[Array]  # the tokens of chunks
    source: Integers
    place: Integers
    length: Integers
    known: Integers
    row: Integers
    good: Array  # a damaged part becomes padding


@dataclass(frozen=True, kw_only=True, slots=True)
class Filling:
    """What rows are filled with. `apart`: several documents share a row, and nothing predicts across them."""

    dtype: np.dtype[Any]
    pad_id: int
    labels: str
    apart: bool
    empty: Empty = lambda name, cells, dtype: np.empty(cells, dtype)

    def fill(self, laid: Laid, tiles: Sequence[Tile]) -> list[dict[str, Array]]:
        kinds = {source.dtype for source in laid.sources}
        way = _way(next(iter(kinds)), self.dtype) if len(kinds) == 1 else None
        _check(laid)
        if way is None:
            return [self._in_numpy(laid, tile) for tile in tiles]
        return self._in_c(laid, tiles, way)

    def _in_c(self, laid: Laid, tiles: Sequence[Tile], way: int) -> list[dict[str, Array]]:
        cells = sum(rows * width for _, _, rows, width in tiles)
        names = self._names()
        columns = [self.empty(n, cells, self.dtype if n == "input_ids" else _INT64) for n in names]
        addresses = {name: column.ctypes.data for name, column in zip(names, columns, strict=True)}
        starts = np.array([source.ctypes.data for source in laid.sources], np.int64)
        address = np.where(laid.good, starts[laid.source] + laid.place * laid.sources[0].itemsize, 0)
        parts = [np.ascontiguousarray(one) for one in (address, laid.length, laid.known, laid.row)]
        first_parts, put = [one.ctypes.data for one in parts], native("load._pack").put
        widths = [(addresses.get(n, 0), self.dtype.itemsize if n == "input_ids" else 8) for n in _COLUMNS]
        filled, at = [], 0
        for first, stop, rows, width in tiles:
            put(
                way,
                _MODES[self.labels],
                self.apart,
                self.pad_id,
                stop - first,
                *[one + 8 * first for one in first_parts],
                rows,
                width,
                *[address and address + at * size for address, size in widths],
            )
            here = slice(at, at := at + rows * width)
            filled.append({n: c[here].reshape(rows, width) for n, c in zip(names, columns, strict=True)})
        return filled

    def _names(self) -> list[str]:
        beside = ["document_ids", "position_ids"] if self.apart else ["attention_mask"]
        return ["input_ids", *beside, "labels"] if self.labels else ["input_ids", *beside]

    def _in_numpy(self, laid: Laid, tile: Tile) -> dict[str, Array]:
        first, stop, rows, width = tile
        laid = _some(laid, slice(first, stop))
        ends = np.cumsum(laid.length)
        before = (ends - laid.length)[np.searchsorted(laid.row, laid.row)] if len(ends) else ends
        column = ends - laid.length - before
        length, known = np.where(laid.good, laid.length, 0), np.where(laid.good, laid.known, 0)
        ids = np.full((rows, width), self.pad_id, self.dtype)
        following = np.full((rows, width + 1), IGNORED, np.int64)  # each token's label, one column later
        filled, starts = np.zeros((rows, width), bool), np.zeros((rows, width + 1), bool)
        for number, source in enumerate(laid.sources):
            mine = laid.source == number
            tokens = source[ragged(laid.place[mine], length[mine])]
            at = ragged(laid.row[mine] * width + column[mine], length[mine])
            ids.reshape(-1)[at] = tokens
            filled.reshape(-1)[at] = True
            more = np.maximum(np.minimum(known, laid.length + 1)[mine] - 1, 0)
            at = ragged(laid.row[mine] * (width + 1) + column[mine] + 1, more)
            following.reshape(-1)[at] = source[ragged(laid.place[mine] + 1, more)]
        starts[laid.row, column] = starts[laid.row, column + laid.length] = True
        starts[:, 0] = True
        columns = {"input_ids": ids}
        if self.apart:
            columns.update(_documents_of(starts[:, :-1]))
        else:
            columns["attention_mask"] = filled.astype(np.int64)
        if self.labels == "next":
            columns["labels"] = following[:, 1:]
        elif self.labels:
            is_label = filled & ~starts[:, :-1] if self.apart else filled
            columns["labels"] = np.where(is_label, ids.astype(np.int64), IGNORED)
        return columns


def _documents_of(starts_here: Array) -> dict[str, Array]:
    """Document and position ids from marks where documents start."""
    columns = np.arange(starts_here.shape[1])
    latest = np.maximum.accumulate(np.where(starts_here, columns, 0), axis=1)
    ids = np.cumsum(starts_here, axis=1)
    return {"document_ids": ids - ids[:, :1], "position_ids": columns - latest}


def _some(laid: Laid, parts: slice) -> Laid:
    names = ("source", "place", "length", "known", "row", "good")
    return replace(laid, **{name: getattr(laid, name)[parts] for name in names})


def _check(laid: Laid) -> None:
    """The extension believes what it is told."""
    sizes = np.array([len(source) for source in laid.sources], np.int64)
    ends = laid.place + np.maximum(laid.length, laid.known)
    if len(ends) and not ((laid.place >= 0) & (ends <= sizes[laid.source])).all():
        raise IndexError("a document lies outside of its chunk")


@cache
def _way(narrow: np.dtype[Any], wide: np.dtype[Any]) -> int | None:
    """How the extension turns one type into the other; None where it cannot."""
    module = native("load._pack") if narrow.isnative and wide.isnative else None
    way: int | None = module.way(f"{narrow.name} {wide.name}") if module else None
    return way
