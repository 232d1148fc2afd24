"""Batches of WebDataset samples: members by name, through the user's transform, collated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.load.batch import ignore, next_good, untouched
from stoker.load.rows import Batch
from stoker.ordering.plan import Task
from stoker.reading.chunks import Chunk
from stoker.reading.layout import TarSamples

Sample = dict[str, Any]  # "__key__" and the bytes of each member, until a transform makes them its own
Transform = Callable[[Sample], Any]
Collate = Callable[[list[Any]], Any]


class SampleAssembler:
    """Cuts samples out of their chunks. A transform is Python per sample, by its nature."""

    def __init__(
        self,
        layouts: Sequence[TarSamples],
        *,
        batch_size: int,
        transform: Transform | None = None,
        collate: Collate | None = None,
    ) -> None:
        self._layouts, self._batch_size = layouts, batch_size
        self._transform, self._collate = transform, collate or collate_samples
        self.skipped = 0
        self.on_sample: Callable[[str], None] = ignore

    def assemble(self, task: Task, held: Sequence[Chunk]) -> list[Batch]:
        good = np.ones(len(task.draw), bool)
        samples = [self._cut(task, row, held, good) for row in range(len(good))]
        if not good.all():
            self.skipped += int((~good).sum())
            samples = [samples[row] for row in next_good(good).tolist()]
        batches: list[Batch] = []
        for first in range(0, len(samples), self._batch_size):
            batch = self._collate([self._changed(s) for s in samples[first : first + self._batch_size]])
            if task.real is not None and isinstance(batch, dict):
                batch["real"] = task.real[first : first + self._batch_size]
            batches.append(batch)
        return batches

    def _cut(self, task: Task, row: int, held: Sequence[Chunk], good: Any) -> Sample:
        sample, number = int(task.draw.sample[row]), task.draw.chunk[row]
        layout, chunk = self._layouts[task.draw.keys[number][0]], held[number]
        shard = int(layout.shard_of(np.array([sample]))[0])
        piece = next(piece for piece in chunk.pieces if piece.shard == shard)
        shift = piece.at - piece.start
        key, members = layout.members(shard, sample)
        if chunk.damaged:
            spans = np.array([(start + shift, stop + shift) for _, start, stop in members])
            good[row] = untouched(spans[:, 0], spans[:, 1], chunk.damaged).all()
        found = {
            suffix: chunk.data[start + shift : stop + shift].tobytes() for suffix, start, stop in members
        }
        return {"__key__": key, **found}

    def _changed(self, sample: Sample) -> Any:
        if self._transform is None:
            return sample
        self.on_sample(f"sample {sample['__key__']!r}")
        try:
            return self._transform(sample)
        except Exception as error:
            error.add_note(f"in transform of sample {sample['__key__']!r}") if hasattr(
                error, "add_note"
            ) else None
            raise


def collate_samples(samples: list[Any]) -> Any:
    """Stack arrays and numbers of one shape, key by key or place by place; anything else becomes a list."""
    first = samples[0]
    if isinstance(first, dict):
        _check_alike(samples)
        return {key: _stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple) and all(isinstance(one, tuple) and len(one) == len(first) for one in samples):
        return tuple(_stack(list(values)) for values in zip(*samples, strict=True))
    return _stack(samples)


def _check_alike(samples: list[Sample]) -> None:
    for sample in samples:
        if other := samples[0].keys() ^ sample.keys():
            names = [repr(one["__key__"]) for one in (samples[0], sample) if "__key__" in one]
            raise UsageError(
                f"samples {' and '.join(names)} of one batch do not both have {', '.join(sorted(other))}",
                hint="give all samples the same keys with `transform`, or give a `collate`",
            )


def _stack(values: list[Any]) -> Any:
    first = values[0]
    if isinstance(first, (bool, int, float, np.number)):
        return np.array(values)
    if isinstance(first, np.ndarray) and all(v.shape == first.shape for v in values):
        return np.stack(values)
    return values
