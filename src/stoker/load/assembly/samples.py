"""Collation of WebDataset samples: members by name, through the user's transform, collated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from stoker.errors import BadShardError, UsageError
from stoker.formats.tar import BLOCK, is_header_of
from stoker.load.assembly.batch import ignore, next_good, untouched
from stoker.load.assembly.rows import Array, Batch
from stoker.load.assembly.transform import Transforms
from stoker.load.media.members import Members
from stoker.load.ordering.plan import Task
from stoker.load.reading.chunks import Chunk
from stoker.load.reading.layout import Piece, TarSamples

Sample = dict[str, Any]  # "__key__" and the bytes of each member, until a transform makes them its own
Collate = Callable[[list[Any]], Any]


class SampleAssembler:
    """Cuts samples out of their chunks. A transform is Python per sample, by its nature."""

    def __init__(
        self,
        layouts: Sequence[TarSamples],
        *,
        batch_size: int,
        transforms: Transforms | None = None,
        collate: Collate | None = None,
        media: Members | None = None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        """`around`: where batches are assembled, as on a stream of a device."""
        self._layouts, self._batch_size = layouts, batch_size
        self._transforms, self._collate, self._media = transforms, collate or collate_samples, media
        self._in_columns = media is not None and media.takes_columns and collate is None
        self._evens = media is not None and collate is None
        self._around = around
        self.skipped = 0
        self.on_sample: Callable[[str], None] = ignore

    def assemble(self, task: Task, held: Sequence[Chunk]) -> list[Batch]:
        with self._around():
            return self._assembled(task, held)

    def _assembled(self, task: Task, held: Sequence[Chunk]) -> list[Batch]:
        good = np.ones(len(task.draw), bool)
        shards = self._shards_of(task)
        columns: dict[str, Any] = {}
        if not self._media:
            samples = [self._cut(task, row, shards[row], held, good) for row in range(len(good))]
        else:
            keys: list[str] = []

            def cut() -> Iterator[Sample]:  # while threads decode those before
                for row in range(len(good)):
                    sample = self._cut(task, row, shards[row], held, good)
                    keys.append(sample["__key__"])
                    yield sample

            decoded = self._media.of(
                task,
                cut(),
                good=good,
                named=lambda row: f"sample {keys[row]!r} in {self._shard_named(task, row, shards[row])}",
                on_sample=self.on_sample,
            )
            samples, columns, good = decoded.samples, decoded.columns, decoded.good
        if not good.all():
            self.skipped += int((~good).sum())
            rows = next_good(good)
            samples = [samples[row] for row in rows.tolist()]
            columns = {name: column[rows] for name, column in columns.items()}
        if self._transforms:
            keys = [sample["__key__"] for sample in samples]
            samples = self._transforms.of(
                samples, named=lambda row: f"sample {keys[row]!r}", on_sample=self.on_sample
            )
        batches: list[Batch] = []
        for first in range(0, len(samples), self._batch_size):
            rows_of_batch = slice(first, first + self._batch_size)
            batches.append(self._collated(samples[rows_of_batch], columns, rows_of_batch))
        if task.real is not None:
            mark_real(batches, task.real, self._batch_size)
        return batches

    def _collated(self, samples: list[Any], columns: dict[str, Any], rows: slice) -> Any:
        """A batch; its images and sounds lie side by side already, unless somebody wanted single samples."""
        beside = {name: column[rows] for name, column in columns.items()}
        if self._media and not self._in_columns:
            beside = {name: column for name, column in beside.items() if name not in self._media.names}
        if self._in_columns:
            samples = [
                {name: one for name, one in sample.items() if name not in beside} for sample in samples
            ]
        batch = self._collate(samples)
        if self._media and self._evens:
            batch = self._media.batched(batch)
        if not beside:
            return batch
        if not isinstance(batch, dict):
            raise UsageError(
                f"{', '.join(beside)} go along with decoded media, and a {type(batch).__name__} has no place",
                hint="let `collate` make a dict",
            )
        return {**batch, **beside}

    def _shards_of(self, task: Task) -> list[int]:
        """Of each row; asked for all at once, since numpy takes as long for one."""
        datasets = task.draw.dataset
        found = np.zeros(len(datasets), np.int64)
        for dataset in np.unique(datasets).tolist():
            rows = datasets == dataset
            found[rows] = self._layouts[dataset].shard_of(task.draw.sample[rows])
        shards: list[int] = found.tolist()
        return shards

    def _shard_named(self, task: Task, row: int, shard: int) -> str:
        layout = self._layouts[task.draw.keys[task.draw.chunk[row]][0]]
        name: str = layout.shards[shard].files[0].name
        return name

    def _cut(self, task: Task, row: int, shard: int, held: Sequence[Chunk], good: Any) -> Sample:
        sample, number = int(task.draw.sample[row]), task.draw.chunk[row]
        layout, chunk = self._layouts[task.draw.keys[number][0]], held[number]
        piece = next(piece for piece in chunk.pieces if piece.shard == shard)
        shift = piece.at - piece.start
        key, members = layout.members(shard, sample)
        if chunk.damaged:
            spans = np.array([(start + shift - BLOCK, stop + shift) for _, start, stop in members])
            good[row] = untouched(spans[:, 0], spans[:, 1], chunk.damaged).all()
        found: Sample = {"__key__": key}
        for suffix, start, stop in members:
            header = chunk.data[start + shift - BLOCK : start + shift].tobytes()
            if good[row] and not is_header_of(header, name=f"{key}.{suffix}", size=stop - start):
                raise _misled(piece, key, suffix, start)
            content = chunk.data[start + shift : stop + shift]
            # what is decoded before the chunk is given back need not be copied
            found[suffix] = content if self._media else content.tobytes()
        return found


def _misled(piece: Piece, key: str, suffix: str, start: int) -> BadShardError:
    return BadShardError(
        f"{piece.file.name} has no member {key}.{suffix} at byte {start:,}, where its index says it is",
        hint="run `stoker prepare index` on the folder after deleting its manifest",
    )


def mark_real(batches: Sequence[Any], real: Array, batch_size: int) -> None:
    """Say in each batch which of its rows do not pad the end of an epoch."""
    for number, batch in enumerate(batches):
        if not isinstance(batch, dict):
            raise UsageError(
                f"tail='pad' repeats samples, and a {type(batch).__name__} has no place to say which",
                hint="let `collate` make a dict, whose `real` will say so, or use tail='drop'",
            )
        if "real" in batch:
            raise UsageError(
                "tail='pad' says in `real` which rows are no padding, and samples have a `real` of their own",
                hint="call theirs otherwise, or use tail='drop'",
            )
        batch["real"] = real[number * batch_size : (number + 1) * batch_size]


def collate_samples(samples: list[Any]) -> Any:
    """Stack arrays, tensors and numbers of one shape, key by key or place by place, also inside each other;
    anything else becomes a list."""
    first = samples[0]
    if isinstance(first, dict) and all(isinstance(one, dict) for one in samples):
        _check_alike(samples)
        return {key: collate_samples([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and all(isinstance(one, tuple) and len(one) == len(first) for one in samples):
        places = [collate_samples(list(values)) for values in zip(*samples, strict=True)]
        return type(first)(*places) if hasattr(first, "_fields") else tuple(places)
    return _stack(samples)


def _check_alike(samples: list[Sample]) -> None:
    for sample in samples:
        if other := samples[0].keys() ^ sample.keys():
            named = [repr(one["__key__"]) for one in (samples[0], sample) if "__key__" in one]
            which = f"samples {' and '.join(named)}" if named else "two samples"
            raise UsageError(
                f"{which} of one batch do not both have {', '.join(sorted(map(str, other)))}",
                hint="give all samples the same keys with `transform`, or give a `collate`",
            )


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if all(isinstance(one, (bool, int, float, np.number, np.bool_)) for one in values):
        numbers = np.array(values)
        return values if numbers.dtype == object else numbers  # too large for any type of numpy's
    if not all(isinstance(one, type(first)) and _shape(one) == _shape(first) for one in values):
        return values
    if isinstance(first, np.ndarray):
        return np.stack(values)
    torch: Any = sys.modules.get("torch")  # who has tensors has imported it
    return torch.stack(values) if torch and isinstance(first, torch.Tensor) else values


def _shape(value: Any) -> Any:
    return getattr(value, "shape", None)
