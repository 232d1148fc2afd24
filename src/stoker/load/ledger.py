"""Sample ledger: which documents any past or future step holds, on any rank. Computed from the order.

    for row in feeder.samples(12_345):
        print(row.rank, [document.name for document in row.documents])

Nothing is noted while a job runs: the position of a step follows from how the job came there (`past.Leg`),
and the planner that made its batches says which samples they were made of.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.formats.sizes import counted
from stoker.load.options import LoaderOptions
from stoker.load.ordering.plan import Cursor, Planner, Task
from stoker.load.parts import Parts, lanes_for, planner_for
from stoker.load.past import Leg, Past
from stoker.load.reading.dataset import Dataset
from stoker.load.reading.items import Items, ItemsLayout, TokenItems
from stoker.load.reading.layout import Documents, TarSamples, Windows
from stoker.load.reading.plain import PlainFile, open_zstd
from stoker.manifest import FileRecord

_WALKED = 64  # batches of packed rows planned at once, where only planning says how many there are


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """What of a document, or of a sample, is in a row. Bytes are those of the shard's file, before it was
    compressed; of one row of token ids, such as a raw .bin, those of the row. Other datasets that are not in
    shards have only the number of the sample."""

    name: str  # what `skip=` takes
    dataset: int  # which one of a blend
    shard: str
    number: int  # in the shard
    first_byte: int
    stop_byte: int
    first_token: int = 0  # of the document, where it is cut
    tokens: int = 0
    key: str = ""  # of a WebDataset sample


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a batch."""

    step: int
    epoch: int
    rank: int
    row: int
    real: bool  # or padding at the end of an epoch
    documents: tuple[Document, ...]


class Ledger:
    """A loader's parts, seen from outside: it shares nothing with the thread that plans."""

    def __init__(self, parts: Parts, options: LoaderOptions, past: Past) -> None:
        assert past.cut is not None
        assert past.dealing is not None
        self.parts, self._options, self.past = parts, options, past
        self._cut, self._dealing = past.cut, replace(past.dealing)
        self._orders = tuple(replace(order) for order in parts.orders)
        self.blended = self._dealing.datasets > 1

    def planner(self, leg: Leg, rank: int) -> Planner:
        """As a rank of a leg had it."""
        share, options = leg.share(rank), replace(self._options, tail=leg.tail)
        lanes = lanes_for(self._orders, options, self._cut, self._dealing, share)
        return planner_for(self.parts.layouts, lanes, options, share, self.past.left_out)


def rows_of_step(ledger: Ledger, step: int, *, rank: int | None = None) -> list[Row]:
    """The rows of a step, of one rank or of all."""
    if step < 0:
        raise UsageError(f"step {step} is impossible", hint="steps count from 0, the first batch of the job")
    leg = ledger.past.legs[bisect_right([leg.step for leg in ledger.past.legs], step) - 1]
    if step < ledger.past.legs[0].step:
        raise UsageError(
            f"step {step:,} came before step {leg.step:,}, from which on this loader knows how it came here",
            hint="ask a loader that went on from an earlier state",
        )
    if rank is not None and not 0 <= rank < leg.ranks:
        raise UsageError(
            f"step {step:,} had {counted(leg.ranks, 'rank')}, and none is rank {rank}",
            hint=f"use a rank from 0 to {leg.ranks - 1}",
        )
    cursor = _cursor_at(ledger.planner(leg, 0), leg, step - leg.step, len(ledger.parts.layouts))
    ranks = range(leg.ranks) if rank is None else [rank]
    return [row for one in ranks for row in _rows(ledger, leg, step, cursor, one)]


def _cursor_at(planner: Planner, leg: Leg, steps: int, epochs: int) -> Cursor:
    """Where the job was so many steps after a leg began. A dataset may hold several `epochs`."""
    cursor = leg.cursor
    if (left := planner.batches(cursor)) is None:
        return _packed_cursor(planner, cursor, steps)
    if steps >= left:
        steps, epoch = steps - left, cursor.epoch + 1
        sizes = [planner.batches(Cursor(epoch=epoch + one)) or 0 for one in range(epochs)]
        if not sum(sizes):
            raise UsageError(
                "an epoch has no batch", hint="use a smaller batch size, fewer ranks or a shorter seq_len"
            )
        turns, steps = divmod(steps, sum(sizes))
        epoch += turns * epochs
        while steps >= sizes[0]:
            steps, epoch, sizes = steps - sizes[0], epoch + 1, sizes[1:]
        cursor = Cursor(epoch=epoch)
    return Cursor(epoch=cursor.epoch, position=cursor.position + steps * leg.ranks * leg.batch)


def _packed_cursor(planner: Planner, cursor: Cursor, steps: int) -> Cursor:
    """Packed rows are counted by packing them, from lengths alone."""
    empty = 0
    while empty < 2:
        some = False
        for task in planner.epoch(cursor, group=lambda: _WALKED):
            some = True
            if steps < task.batches:
                return task.after[steps - 1] if steps else cursor
            steps, cursor = steps - task.batches, task.after[-1]
        empty = 0 if some else empty + 1
        cursor = Cursor(epoch=cursor.epoch + (cursor.position > 0 or cursor.row > 0 or not some))
    raise UsageError(
        "an epoch has no batch", hint="use a smaller batch size, fewer ranks or a shorter seq_len"
    )


def _rows(ledger: Ledger, leg: Leg, step: int, cursor: Cursor, rank: int) -> Iterator[Row]:
    task = next(_tasks(ledger.planner(leg, rank), cursor))
    for row in range(leg.batch):
        yield Row(
            step=step,
            epoch=cursor.epoch,
            rank=rank,
            row=row,
            real=task.real is None or bool(task.real[row]),
            documents=tuple(_documents(ledger, task, row)),
        )


def _tasks(planner: Planner, cursor: Cursor) -> Iterator[Task]:
    """From a cursor on; what is left of an epoch may be less than a batch of packed rows."""
    while True:
        yield from planner.epoch(cursor, group=lambda: 1)
        cursor = Cursor(epoch=cursor.epoch + 1)


def _documents(ledger: Ledger, task: Task, row: int) -> Iterator[Document]:
    draw = task.draw
    if task.packed is None:
        parts: Sequence[tuple[int, int, int]] = [(row, 0, -1)]
    else:
        mine = np.flatnonzero(task.packed.row == row)
        columns = (task.packed.item, task.packed.start, task.packed.length)
        parts = list(zip(*(column[mine].tolist() for column in columns), strict=True))
    for item, start, length in parts:
        number, sample = draw.keys[int(draw.chunk[item])][0], int(draw.sample[item])
        yield from documents_of(ledger, number, sample, start=start, length=length)


def documents_of(
    ledger: Ledger, number: int, sample: int, *, start: int = 0, length: int = -1
) -> Iterator[Document]:
    """The documents in a sample of a layout; of a packed one, `length` tokens from `start` on."""
    layout: Any = ledger.parts.layouts[number]
    dataset = number if ledger.blended else 0
    if isinstance(layout, Windows):
        yield from _window(ledger, number, dataset, layout, sample)
    elif isinstance(layout, (Documents, TarSamples)):
        shard = int(layout.shard_of(np.array([sample]))[0])
        (first, stop) = layout.spans(shard, np.array([sample]))[0].tolist()
        inside, key, tokens = sample - int(layout.starts[shard]), "", 0
        if isinstance(layout, Documents):
            token = layout.dtype.itemsize
            tokens = length if length >= 0 else min((stop - first) // token, ledger._options.seq_len)
            first, stop = first + start * token, first + (start + tokens) * token
        else:
            key = layout.members(shard, sample)[0]
        yield _document(ledger, dataset, layout, shard, inside, (first, stop), start, tokens, key)
    else:
        yield _item(layout.items, f"{dataset}:" if ledger.blended else "", dataset, sample)


def _item(items: Items, prefix: str, dataset: int, sample: int) -> Document:
    tokens, (first, stop) = (
        (items.seq_len, items.span(sample)) if isinstance(items, TokenItems) else (0, (0, 0))
    )
    return Document(
        name=f"{prefix}#{sample}",
        dataset=dataset,
        shard="",
        number=sample,
        first_byte=first,
        stop_byte=stop,
        tokens=tokens,
    )


def _window(ledger: Ledger, number: int, dataset: int, layout: Windows, sample: int) -> Iterator[Document]:
    """The documents that a window of tokens is cut from."""
    shard = int(layout.shard_of(np.array([sample]))[0])
    begin, token = int(layout.token_in_shard(np.array([sample]))[0]), layout.dtype.itemsize
    bounds = documents_beside(ledger, number).bounds(shard) // token
    low = int(np.searchsorted(bounds, begin, side="right")) - 1
    high = int(np.searchsorted(bounds, begin + layout.seq_len, side="left"))
    for inside in range(low, high):
        first, stop = max(begin, int(bounds[inside])), min(begin + layout.seq_len, int(bounds[inside + 1]))
        if stop > first:
            span = (first * token, stop * token)
            skipped = first - int(bounds[inside])
            yield _document(ledger, dataset, layout, shard, inside, span, skipped, stop - first)


def documents_beside(ledger: Ledger, number: int) -> Documents:
    """The documents that the windows of a layout are cut from."""
    found: Documents = ledger.parts.datasets[number].documents(0 if ledger.blended else number)
    return found


def _document(
    ledger: Ledger,
    dataset: int,
    layout: Any,
    shard: int,
    inside: int,
    span: tuple[int, int],
    first_token: int,
    tokens: int,
    key: str = "",
) -> Document:
    file = layout.shards[shard].files[0].name
    prefix = f"{dataset}:" if ledger.blended else ""
    return Document(
        name=f"{prefix}{file}#{inside}",
        dataset=dataset,
        shard=file,
        number=inside,
        first_byte=span[0],
        stop_byte=span[1],
        first_token=first_token,
        tokens=tokens,
        key=key,
    )


def read_document(ledger: Ledger, document: Document) -> Any:
    """Its part in a row: ids, or the bytes of each member of a tar's sample; or the sample of a dataset."""
    found = [
        (number, layout)
        for number, layout in enumerate(ledger.parts.layouts)
        if (number == document.dataset or not ledger.blended)
        and (not document.shard or any(one.files[0].name == document.shard for one in layout.shards))
    ]
    number, layout = found[0]
    dataset: Any = ledger.parts.datasets[number]
    if isinstance(layout, ItemsLayout):
        (sample,) = layout.items.some([document.number])
        return sample["input_ids"] if isinstance(layout.items, TokenItems) else sample
    file = next(one.files[0] for one in layout.shards if one.files[0].name == document.shard)
    if isinstance(layout, TarSamples):
        shard = next(n for n, one in enumerate(layout.shards) if one.files[0] is file)
        _, members = layout.members(shard, int(layout.starts[shard]) + document.number)
        return {suffix: _bytes(dataset, file, start, stop) for suffix, start, stop in members}
    return np.frombuffer(_bytes(dataset, file, document.first_byte, document.stop_byte), dataset.dtype)


def _bytes(dataset: Dataset, file: FileRecord, start: int, stop: int) -> bytes:
    is_zstd = file.name.endswith(".zst")
    plain: Any = (open_zstd if is_zstd else PlainFile)(dataset.reader, file.name, file.bytes)
    plain.seek(start)
    data: bytes = plain.read(stop - start)
    return data
