"""Padding and packing: batches of whole documents, one a row, padded; or several, by best fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stoker.load.assembly.batch import by_dataset, ignore, next_good, untouched
from stoker.load.assembly.cells import Filling, Laid
from stoker.load.assembly.rows import Array, Batch, Buffers, Rows
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.packing import Packed
from stoker.load.ordering.plan import Task
from stoker.load.reading.chunks import Chunk
from stoker.load.reading.layout import Documents
from stoker.mixing import Integers

# Bucketed rows are padded to a multiple of this: few enough shapes for compiled models, and full tiles
# for tensor cores.
_MULTIPLE = 64


class DocumentAssembler:
    """Makes rows of documents from their chunks, in one call for a group of batches of one width."""

    def __init__(
        self,
        layouts: Sequence[Documents],
        *,
        batch_size: int,
        seq_len: int,
        dtype: np.dtype[Any],
        pad_id: int = 0,
        labels: str = "next",
        trim: bool = False,
        packed: bool = False,
    ) -> None:
        self._layouts, self._batch_size, self._seq_len, self._trim = layouts, batch_size, seq_len, trim
        self._buffers: dict[str, Buffers] = {}
        self._one_more = labels == "next"  # token than a row holds, which is the label of its last
        self._filling = Filling(dtype=dtype, pad_id=pad_id, labels=labels, apart=packed, empty=self._empty)
        self.skipped = 0
        self.on_sample: Callable[[str], None] = ignore

    def assemble(self, task: Task, held: Sequence[Chunk]) -> Sequence[Batch]:
        places, lengths, good = self._find(task.draw, held)
        self.skipped += int((~good).sum())
        sources = [
            chunk.data[: chunk.data.nbytes // 8 * 8].view(self._layouts[key[0]].dtype)
            for chunk, key in zip(held, task.draw.keys, strict=True)
        ]
        if task.packed is not None:
            return self._packed(task.packed, task.draw, sources, places, lengths, good)
        rows = np.arange(len(good)) if good.all() else next_good(good)
        return self._padded(task, sources, task.draw.chunk[rows], places[rows], lengths[rows])

    def _find(self, draw: Draw, held: Sequence[Chunk]) -> tuple[Integers, Integers, Array]:
        """Where each document starts in its chunk (in tokens), its length, and whether it is whole."""
        places, lengths = np.empty(len(draw), np.int64), np.empty(len(draw), np.int64)
        good = np.ones(len(draw), bool)
        for which, mine, part in by_dataset(draw):
            layout = self._layouts[which]
            shards = layout.shard_of(part.sample)
            spans = layout.spans_of(shards, part.sample)
            spans += _shifts(held, part.chunk, shards)[:, None]
            places[mine] = spans[:, 0] // layout.dtype.itemsize
            lengths[mine] = (spans[:, 1] - spans[:, 0]) // layout.dtype.itemsize
            for number in (n for n, chunk in enumerate(held) if chunk.damaged):
                here = np.flatnonzero(part.chunk == number)
                whole = untouched(spans[here, 0], spans[here, 1], held[number].damaged)
                good[np.arange(len(draw))[mine][here]] = whole
        return places, lengths, good

    def _padded(
        self, task: Task, sources: Sequence[Array], source: Integers, places: Integers, lengths: Integers
    ) -> Sequence[Batch]:
        known = np.minimum(lengths, self._seq_len + self._one_more)
        each = self._batch_size if self._trim else len(known)
        firsts = np.arange(0, len(known), each)
        widths = np.repeat(self._widths(np.maximum.reduceat(known, firsts)), each)[: len(known)]
        laid = Laid(
            sources=sources,
            source=source,
            place=places,
            length=np.minimum(known, widths),
            known=known,
            row=np.arange(len(known)) % each,
            good=np.ones(len(known), bool),
        )
        stops = np.minimum(firsts + each, len(known))
        tiles = zip(
            firsts.tolist(), stops.tolist(), (stops - firsts).tolist(), widths[firsts].tolist(), strict=True
        )
        filled: list[Batch] = self._filling.fill(laid, list(tiles))
        if task.real is not None:
            for batch, first, stop in zip(filled, firsts, stops, strict=True):
                batch["real"] = task.real[first:stop]
        return filled if self._trim else Rows(filled[0], self._batch_size)

    def _widths(self, longest: Integers) -> Integers:
        if not self._trim:
            return np.full(len(longest), self._seq_len)
        tokens = np.maximum(1, longest - self._one_more)
        widths: Integers = np.minimum(self._seq_len, -(-tokens // _MULTIPLE) * _MULTIPLE)
        return widths

    def _packed(
        self,
        packed: Packed,
        draw: Draw,
        sources: Sequence[Array],
        places: Integers,
        lengths: Integers,
        good: Array,
    ) -> Sequence[Batch]:
        left = lengths[packed.item] - packed.start  # a long document goes on in another row
        laid = Laid(
            sources=sources,
            source=draw.chunk[packed.item],
            place=places[packed.item] + packed.start,
            length=packed.length,
            known=np.minimum(left, packed.length + self._one_more),
            row=packed.row,
            good=good[packed.item],
        )
        (filled,) = self._filling.fill(laid, [(0, len(packed.row), packed.rows, self._seq_len)])
        batches = Rows(filled, self._batch_size)
        return [{**batch, "cu_seqlens": _cu_seqlens(batch["position_ids"])} for batch in batches]

    def _empty(self, name: str, cells: int, dtype: np.dtype[Any]) -> Array:
        """Memory that was used before is there already."""
        return self._buffers.setdefault(name, Buffers()).take((cells,), dtype)


def _cu_seqlens(position_ids: Array) -> Array:
    """Where each document of a batch starts when its rows are laid end to end, and the end: what
    block-diagonal attention kernels take."""
    starts = np.flatnonzero(position_ids.reshape(-1) == 0)
    return np.append(starts, position_ids.size).astype(np.int32)


def _shifts(held: Sequence[Chunk], chunk: Integers, shards: Integers) -> Integers:
    """How far each document lies from its place in its file: in its chunk, that much earlier or later."""
    shifts: Integers = np.array([one.pieces[0].at - one.pieces[0].start for one in held], np.int64)[chunk]
    for number in (n for n, one in enumerate(held) if len(one.pieces) > 1):
        mine = np.flatnonzero(chunk == number)
        for piece in held[number].pieces[1:]:
            shifts[mine[shards[mine] == piece.shard]] = piece.at - piece.start
    return shifts
