"""Gather: batches from chunks, vectorised into a reused buffer for a group of batches, or some of it.

A buffer holds [rows, seq_len + 1] tokens; `input_ids` and `labels` are two views of it, one token apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.errors import BadShardError
from stoker.load.assembly.boundaries import Boundaries, boundaries
from stoker.load.assembly.gather import Gathering, rows_of
from stoker.load.assembly.rows import Array, Batch, Buffers, Later, Rows
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
        self._beside: dict[str, Buffers] = {}
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
        columns, seams = self._columns(tokens), None
        if self._documents:
            seams = self._boundaries(draw)
            columns.update((name, self._wrap(ids)) for name, ids in seams.ids(self._beside).items())
            if self._labels:  # none is predicted from the document before
                first = seams.first_labels(ahead=self._labels == "next")
                columns["labels"] = self._ignored(columns["labels"], first)
        if task.real is not None:
            columns["real"] = self._wrap(task.real)
        rows = Rows(columns, self._batch_size)
        if seams is None:
            return rows
        bounds = seams.cu_seqlens(self._batch_size)
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

    def _ignored(self, labels: Any, where: tuple[Integers, Integers]) -> Any:
        copied = self._beside.setdefault("labels", Buffers()).take(labels.shape, np.dtype(np.int64))
        copied[...] = labels.numpy() if hasattr(labels, "numpy") else labels
        copied[where] = IGNORED
        return self._wrap(copied)

    def _boundaries(self, draw: Draw) -> Boundaries:
        """Where documents begin in these rows, and in the token behind each."""
        assert self._documents is not None
        cells = self._layouts[0].seq_len
        found: list[tuple[Integers, Integers]] = []
        for which, mine, part in by_dataset(draw):
            layout, documents = self._layouts[which], self._documents[which]
            rows, shards, tokens = (
                np.arange(len(draw))[mine],
                layout.shard_of(part.sample),
                layout.token_in_shard(part.sample),
            )
            for shard in np.unique(shards).tolist():
                bounds = documents.bounds(shard) // layout.dtype.itemsize
                here = np.flatnonzero(shards == shard)
                low = np.searchsorted(bounds, tokens[here], side="left")
                high = np.searchsorted(bounds, tokens[here] + cells + 1, side="left")
                found.append(
                    (
                        np.repeat(rows[here], high - low),
                        bounds[ragged(low, high - low)] - np.repeat(tokens[here], high - low),
                    )
                )
        return boundaries(found, rows=len(draw), cells=cells)


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
