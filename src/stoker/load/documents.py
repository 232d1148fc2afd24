"""Batches of whole documents: one a row, padded; or several a row, packed by best fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stoker.load.batch import IGNORED, cu_seqlens, documents_of, ignore, next_good, ragged, untouched
from stoker.load.rows import Array, Batch
from stoker.mixing import Integers
from stoker.ordering.order import Draw
from stoker.ordering.plan import Task
from stoker.reading.chunks import Chunk
from stoker.reading.layout import Documents

# Bucketed rows are padded to a multiple of this: few enough shapes for compiled models, and full tiles
# for tensor cores.
_MULTIPLE = 64


class DocumentAssembler:
    """Makes rows of documents from their chunks, gathered token-wise in one call per chunk."""

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
    ) -> None:
        self._layouts, self._batch_size, self._seq_len = layouts, batch_size, seq_len
        self._dtype, self._pad_id, self._labels, self._trim = dtype, pad_id, labels, trim
        self.skipped = 0
        self.on_sample: Callable[[str], None] = ignore

    def assemble(self, task: Task, held: Sequence[Chunk]) -> list[Batch]:
        places, lengths, good = self._find(task.draw, held)
        if task.packed is None:
            rows = np.arange(len(good)) if good.all() else next_good(good)
            self.skipped += int((~good).sum())
            cut = np.minimum(lengths[rows], self._seq_len + 1)
            tokens, ends = self._gather(task.draw, held, task.draw.chunk[rows], places[rows], cut)
            return self._padded(task, tokens, ends, cut)
        return [self._packed(task, held, places, good)]

    def _find(self, draw: Draw, held: Sequence[Chunk]) -> tuple[Integers, Integers, Array]:
        """Where each document starts in its chunk (in tokens), its length, and whether it is whole."""
        places, lengths = np.empty(len(draw), np.int64), np.empty(len(draw), np.int64)
        good = np.ones(len(draw), bool)
        for number, chunk in enumerate(held):
            mine = np.flatnonzero(draw.chunk == number)
            layout = self._layouts[draw.keys[number][0]]
            shards = layout.shard_of(draw.sample[mine])
            for piece in chunk.pieces:
                here = mine[shards == piece.shard]
                spans = layout.spans(piece.shard, draw.sample[here]) - piece.start + piece.at
                good[here] = untouched(spans[:, 0], spans[:, 1], chunk.damaged)
                places[here] = spans[:, 0] // layout.dtype.itemsize
                lengths[here] = (spans[:, 1] - spans[:, 0]) // layout.dtype.itemsize
        return places, lengths, good

    def _gather(
        self, draw: Draw, held: Sequence[Chunk], chunk_of: Integers, places: Integers, lengths: Integers
    ) -> tuple[Array, Integers]:
        """The tokens of every stretch, end to end, and where each ends."""
        ends = np.cumsum(lengths)
        tokens = np.empty(int(ends[-1]) if len(ends) else 0, self._dtype)
        for number, chunk in enumerate(held):
            mine = np.flatnonzero(chunk_of == number)
            source = ragged(places[mine], lengths[mine])
            kind = self._layouts[draw.keys[number][0]].dtype
            tokens[ragged((ends - lengths)[mine], lengths[mine])] = chunk.data.view(kind)[source]
        return tokens, ends

    def _padded(self, task: Task, tokens: Array, ends: Integers, lengths: Integers) -> list[Batch]:
        batches: list[Batch] = []
        for first in range(0, len(lengths), self._batch_size):
            rows = slice(first, first + self._batch_size)
            width = self._width(lengths[rows])
            begin, end = int(ends[first] - lengths[first]), int(ends[min(rows.stop, len(ends)) - 1])
            batch = self._padded_batch(tokens[begin:end], lengths[rows], width)
            if task.real is not None:
                batch["real"] = task.real[rows]
            batches.append(batch)
        return batches

    def _width(self, lengths: Integers) -> int:
        if not self._trim:
            return self._seq_len
        return min(self._seq_len, -(-max(1, int(lengths.max()) - 1) // _MULTIPLE) * _MULTIPLE)

    def _padded_batch(self, tokens: Array, lengths: Integers, width: int) -> Batch:
        columns = np.arange(width + 1)
        filled = columns < lengths[:, None]
        rows = np.full((len(lengths), width + 1), self._pad_id, self._dtype)
        rows[filled] = tokens
        batch: Batch = {"input_ids": rows[:, :-1], "attention_mask": filled[:, :-1].astype(np.int64)}
        if self._labels:
            shift = 1 if self._labels == "next" else 0
            here = slice(shift, width + shift)
            batch["labels"] = np.where(filled[:, here], rows[:, here].astype(np.int64), IGNORED)
        return batch

    def _packed(self, task: Task, held: Sequence[Chunk], places: Integers, good: Array) -> Batch:
        packed = task.packed
        assert packed is not None
        lengths = np.where(good[packed.item], packed.length, 0)
        self.skipped += int((~good).sum())
        chunk_of = task.draw.chunk[packed.item]
        tokens, _ = self._gather(task.draw, held, chunk_of, places[packed.item] + packed.start, lengths)
        cells = ragged(packed.row * self._seq_len + packed.column, lengths)
        shape = (packed.rows, self._seq_len)
        input_ids = np.full(shape, self._pad_id, self._dtype)
        input_ids.reshape(-1)[cells] = tokens
        filled = np.zeros(shape, bool)
        filled.reshape(-1)[cells] = True
        starts = np.zeros(shape, bool)
        # the padding after the last document is a document of its own, so that nothing attends to it
        starts[packed.row, packed.column] = True
        ends = packed.column + packed.length
        inside = ends < self._seq_len
        starts[packed.row[inside], ends[inside]] = True
        batch: Batch = {"input_ids": input_ids, **documents_of(starts)}
        if self._labels:
            batch["labels"] = self._packed_labels(input_ids, filled, starts)
        return {**batch, "cu_seqlens": cu_seqlens(batch["position_ids"])}

    def _packed_labels(self, input_ids: Array, filled: Array, starts: Array) -> Array:
        """The next token of the same document; the last of one has none."""
        if self._labels == "same":
            return np.where(filled & ~starts, input_ids.astype(np.int64), IGNORED)
        labels = np.full(input_ids.shape, IGNORED, np.int64)
        going_on = filled[:, 1:] & ~starts[:, 1:]
        labels[:, :-1][going_on] = input_ids[:, 1:][going_on]
        return labels
