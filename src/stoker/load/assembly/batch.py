"""Gather: batches from chunks, vectorised into a reused buffer for a group of batches, or some of it.

A buffer holds [rows, seq_len + 1] tokens; `input_ids` and `labels` are two views of it, one token apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.errors import BadShardError
from stoker.load.assembly.gather import Gathering, rows_of
from stoker.load.assembly.rows import Array, Batch, Buffers, Later, Rows, split
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.plan import Task
from stoker.load.reading.chunks import Chunk
from stoker.load.reading.engines import PAGE, Bytes, page_aligned
from stoker.load.reading.layout import Documents, Windows
from stoker.mixing import Integers

IGNORED = -100  # the label that losses leave out, in torch and everywhere since


class Assembler(Protocol):
    """Makes the batches of a task. Called from one thread; `held` are the chunks of its draw. Counts the
    damaged samples it left out; tells `on_sample` what it works on, where that is slow."""

    skipped: int
    on_sample: Callable[[str], None]

    def assemble(self, task: Task, held: Sequence[Chunk]) -> Sequence[Batch]: ...


def ignore(status: str) -> None:
    """Nobody asked."""


class Arena:
    """Room for chunks of one size, side by side, seen as tokens."""

    def __init__(self, slots: int, slot_bytes: int) -> None:
        # a page more: a chunk begins as far into its slot as into a page of its file
        self.slot_bytes = (-(-slot_bytes // PAGE) + 1) * PAGE
        self._memory = page_aligned(slots * self.slot_bytes)

    @property
    def bytes(self) -> int:
        return self._memory.nbytes

    def slot(self, number: int) -> Bytes:
        return self._memory[number * self.slot_bytes : (number + 1) * self.slot_bytes]

    def tokens(self, dtype: np.dtype[Any]) -> Array:
        return self._memory.view(dtype)


class WindowAssembler:
    """Fixed windows of the token stream. `at_once`: batches to gather when the first of them is asked for,
    where the chunks stay as they are until the last is; all of a group if 0."""

    def __init__(
        self,
        layouts: Sequence[Windows],
        arena: Callable[[], Arena],
        *,
        batch_size: int,
        dtype: np.dtype[Any],
        labels: str = "next",
        documents: Sequence[Documents] | None = None,
        wrap: Callable[[Array], Any] = lambda array: array,
        at_once: int = 0,
    ) -> None:
        self._layouts, self._arena, self._batch_size, self._wrap = layouts, arena, batch_size, wrap
        self._at_once = at_once
        self._dtype, self._labels, self._documents = dtype, labels, documents
        self._buffers = Buffers()
        self.skipped = 0
        self.on_sample: Callable[[str], None] = ignore

    def assemble(self, task: Task, held: Sequence[Chunk]) -> Sequence[Batch]:
        draw = task.draw
        if any(chunk.damaged for chunk in held):
            draw = draw.rows(self._whole_rows(draw, held))
        if self._at_once and not self._documents and task.real is None and _is_of_one_dataset(draw):
            return self._later(draw, held)
        return self._batches(task, draw, self._tokens(draw, held))

    def _later(self, draw: Draw, held: Sequence[Chunk]) -> Later:
        layout, size = self._layouts[draw.keys[0][0]], self._batch_size
        arena = self._arena()
        places = places_of(layout, draw, held, arena.slot_bytes)
        gathering = Gathering(arena.tokens(layout.dtype), places, self._dtype)

        def make(batches: range) -> Rows:
            rows = min(batches.stop * size, len(draw)) - batches.start * size
            tokens = self._buffers.take((rows, layout.seq_len + 1), self._dtype)
            gathering.put(tokens, first=batches.start * size)
            return Rows(self._columns(self._wrap(tokens)), size)

        return Later(-(-len(draw) // size), make, at_once=self._at_once)

    def _tokens(self, draw: Draw, held: Sequence[Chunk]) -> Any:
        """The tokens of these rows, [rows, seq_len + 1]."""
        tokens = self._buffers.take((len(draw), self._layouts[0].seq_len + 1), self._dtype)
        arena = self._arena()  # it is another one when it had to grow
        for which, mine, part in by_dataset(draw):
            layout = self._layouts[which]
            places = places_of(layout, part, held, arena.slot_bytes)
            if isinstance(mine, slice):
                Gathering(arena.tokens(layout.dtype), places, self._dtype).put(tokens)
            else:
                tokens[mine] = rows_of(arena.tokens(layout.dtype), tokens.shape[1])[places]
        return self._wrap(tokens)

    def _batches(self, task: Task, draw: Draw, tokens: Any) -> Sequence[Batch]:  # an array, or a tensor
        columns, extras = self._columns(tokens), {}
        if self._documents:
            starts = self._document_starts(draw)
            extras = documents_of(starts[:, :-1])
            columns.update((name, self._wrap(ids)) for name, ids in extras.items())
            if self._labels:  # none is predicted from the document before
                first = starts[:, 1:] if self._labels == "next" else starts[:, :-1]
                columns["labels"] = self._ignored(columns["labels"], first)
        if task.real is not None:
            columns["real"] = self._wrap(task.real)
        rows = Rows(columns, self._batch_size)
        if not extras:
            return rows
        bounds = map(cu_seqlens, split(extras["position_ids"], self._batch_size))
        return [{**batch, "cu_seqlens": self._wrap(each)} for batch, each in zip(rows, bounds, strict=True)]

    def _columns(self, tokens: Any) -> dict[str, Any]:
        columns = {"input_ids": tokens[:, :-1]}
        if self._labels:
            columns["labels"] = tokens[:, 1:] if self._labels == "next" else tokens[:, :-1]
        return columns

    def _whole_rows(self, draw: Draw, held: Sequence[Chunk]) -> Integers:
        """Which row stands where: a damaged one gives its place to the next whole one, and is counted."""
        good = np.ones(len(draw), bool)
        for number in (n for n, chunk in enumerate(held) if chunk.damaged):
            mine = np.flatnonzero(draw.chunk == number)
            layout = self._layouts[draw.keys[number][0]]
            token = layout.dtype.itemsize
            starts = layout.token_in_chunk(draw.rows(mine)) * token
            good[mine] = untouched(starts, starts + (layout.seq_len + 1) * token, held[number].damaged)
        self.skipped += int((~good).sum())
        return next_good(good)

    def _ignored(self, labels: Any, where: Array) -> Any:
        plain = labels.numpy() if hasattr(labels, "numpy") else labels
        copied = np.array(plain, np.int64)
        copied[where] = IGNORED
        return self._wrap(copied)

    def _document_starts(self, draw: Draw) -> Array:
        """Which tokens of each row are the first of a document, [rows, seq_len + 1]."""
        assert self._documents is not None
        starts_here = np.zeros((len(draw), self._layouts[0].seq_len + 1), bool)
        for which, mine, part in by_dataset(draw):
            layout, documents = self._layouts[which], self._documents[which]
            shards, tokens = layout.shard_of(part.sample), layout.token_in_shard(part.sample)
            for shard in np.unique(shards).tolist():
                bounds = documents.bounds(shard) // layout.dtype.itemsize
                here = shards == shard
                _mark_starts(starts_here, np.arange(len(draw))[mine][here], tokens[here], bounds)
        return starts_here


def _is_of_one_dataset(draw: Draw) -> bool:
    return len({dataset for dataset, _, _ in draw.keys}) == 1


def by_dataset(draw: Draw) -> Iterator[tuple[int, slice | Integers, Draw]]:
    """Each dataset of a draw: its number, which rows are its own, and what was drawn of it."""
    if _is_of_one_dataset(draw):
        yield draw.keys[0][0], slice(None), draw
        return
    dataset = draw.dataset
    for which in sorted({which for which, _, _ in draw.keys}):
        mine = np.flatnonzero(dataset == which)
        yield which, mine, draw.rows(mine)


def places_of(layout: Windows, draw: Draw, held: Sequence[Chunk], slot_bytes: int) -> Integers:
    """The first token of each sample in the memory that holds the chunks, slot after slot."""
    room = slot_bytes // layout.dtype.itemsize
    firsts = (first for _, first, _ in draw.keys)
    slots = [
        chunk.slot * room + chunk.lead // layout.dtype.itemsize - first * layout.seq_len
        for chunk, first in zip(held, firsts, strict=True)
    ]
    places: Integers = np.array(slots)[draw.chunk] + draw.sample * layout.seq_len
    in_pieces = np.array([len(chunk.pieces) > 1 for chunk in held])
    if in_pieces.any():  # few are, and to look for a sample's shard takes longer than all of the above
        rows = np.flatnonzero(in_pieces[draw.chunk])
        places[rows] += layout.gaps_before(draw.rows(rows))
    return places


def _mark_starts(marks: Array, rows: Integers, tokens: Integers, bounds: Integers) -> None:
    low = np.searchsorted(bounds, tokens, side="left")
    high = np.searchsorted(bounds, tokens + marks.shape[1], side="left")
    row, bound = np.repeat(np.arange(len(rows)), high - low), ragged(low, high - low)
    marks[rows[row], bounds[bound] - tokens[row]] = True


def documents_of(starts_here: Array) -> dict[str, Array]:
    """Document and position ids from marks where documents start."""
    columns = np.arange(starts_here.shape[1])
    latest = np.maximum.accumulate(np.where(starts_here, columns, 0), axis=1)
    ids = np.cumsum(starts_here, axis=1)
    return {"document_ids": ids - ids[:, :1], "position_ids": columns - latest}


def cu_seqlens(position_ids: Array) -> Array:
    """Where each document of a batch starts when its rows are laid end to end, and the end: what
    block-diagonal attention kernels take."""
    starts = np.flatnonzero(position_ids.reshape(-1) == 0)
    return np.append(starts, position_ids.size).astype(np.int32)


def ragged(starts: Integers, lengths: Integers) -> Integers:
    """The numbers start, start + 1, ... of each stretch, one stretch after the other."""
    ends = np.cumsum(lengths)
    steps = np.arange(int(ends[-1]) if len(ends) else 0)
    numbers: Integers = steps + np.repeat(starts - (ends - lengths), lengths)
    return numbers


def untouched(starts: Integers, stops: Integers, damaged: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    good = np.ones(len(starts), bool)
    for first, last in damaged:
        good &= (stops <= first) | (starts >= last)
    return good


class AllDamagedError(BadShardError):
    """A group has no sample that could stand in for its damaged ones."""


def next_good(good: npt.NDArray[np.bool_]) -> Integers:
    """For each row, itself if it is good, or the next good one, going round."""
    whole = np.flatnonzero(good)
    if not len(whole):
        raise AllDamagedError(
            f"all {len(good)} samples of a group of batches are damaged",
            hint="stage or copy the shards again; `stoker prepare verify` lists what is damaged",
        )
    rows: Integers = whole[np.searchsorted(whole, np.arange(len(good))) % len(whole)]
    return rows
