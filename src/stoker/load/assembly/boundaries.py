"""Document boundaries in windows of a token stream: ids, positions and `cu_seqlens` for masks that keep
documents apart, from the few cells in which a document begins."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.load.assembly.rows import Array, Buffers
from stoker.mixing import Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundaries:
    """Where documents begin in rows of so many cells, and in the cell behind each row: its last label."""

    rows: int
    cells: int
    row: Integers  # of each beginning, sorted by row and column
    column: Integers

    def ids(self, buffers: dict[str, Buffers]) -> dict[str, Array]:
        """`document_ids`, counted in each row, and `position_ids`, counted in each document.

        Running sums over steps that are nearly all equal: in memory that was used before, several times as
        fast as sums over marks of every cell."""
        firsts = self._firsts
        row = firsts // self.cells
        begins_row = np.searchsorted(firsts, np.arange(self.rows) * self.cells)
        number = np.arange(len(firsts)) - begins_row[row]
        lengths = np.diff(firsts, append=self.rows * self.cells)
        return {
            "document_ids": self._sums("document_ids", 0, np.diff(number, prepend=0), buffers),
            "position_ids": self._sums("position_ids", 1, np.append(0, 1 - lengths[:-1]), buffers),
        }

    def _sums(self, name: str, usual: int, jumps: Integers, buffers: dict[str, Buffers]) -> Array:
        """Running sums of a step that is the usual one but where a document begins."""
        shape = (self.rows, self.cells)
        out = buffers.setdefault(name, Buffers()).take(shape, np.dtype(np.int64))
        flat = out.reshape(-1)
        flat.fill(usual)
        flat[self._firsts] = jumps
        np.cumsum(flat, out=flat)
        return out

    @property
    def _firsts(self) -> Integers:
        """The first cell of each stretch of one document, rows laid end to end."""
        inside = self.column < self.cells
        begins = self.row[inside] * self.cells + self.column[inside]
        return np.union1d(begins, np.arange(self.rows) * self.cells)

    def first_labels(self, *, ahead: int) -> tuple[Integers, Integers]:
        """The rows and columns of labels that are the first token of a document, where a label is the token
        `ahead` of its cell."""
        column = self.column - ahead
        inside = (column >= 0) & (column < self.cells)
        return self.row[inside], column[inside]

    def cu_seqlens(self, batch_size: int) -> Iterator[Array]:
        """For each batch, where its documents start when its rows are laid end to end, and the end: what
        block-diagonal attention kernels take."""
        firsts = self._firsts
        for row in range(0, self.rows, batch_size):
            start, stop = row * self.cells, min(row + batch_size, self.rows) * self.cells
            low, high = np.searchsorted(firsts, (start, stop))
            yield np.append(firsts[low:high] - start, stop - start).astype(np.int32)


def boundaries(found: list[tuple[Any, Any]], *, rows: int, cells: int) -> Boundaries:
    """Of the rows and columns found, in any order."""
    row = np.concatenate([one for one, _ in found]) if found else np.empty(0, np.int64)
    column = np.concatenate([one for _, one in found]) if found else np.empty(0, np.int64)
    order = np.lexsort((column, row))
    return Boundaries(rows=rows, cells=cells, row=row[order], column=column[order])
