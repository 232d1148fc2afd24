"""Batches of numbered items: whole ones at once where the dataset can, else sample by sample, collated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stoker.errors import UsageError
from stoker.load.assembly.batch import ignore
from stoker.load.assembly.rows import Batch
from stoker.load.assembly.samples import Collate, collate_samples, mark_real
from stoker.load.assembly.transform import Transforms
from stoker.load.ordering.draw import Draw, Key
from stoker.load.ordering.plan import Task
from stoker.load.reading.chunks import Chunk
from stoker.load.reading.items import ItemsLayout


class ItemAssembler:
    """Asks datasets for the samples of a draw."""

    def __init__(
        self,
        layouts: Sequence[ItemsLayout],
        *,
        batch_size: int,
        transforms: Transforms | None = None,
        collate: Collate | None = None,
    ) -> None:
        self._layouts, self._batch_size = layouts, batch_size
        self._transforms, self._collate = transforms, collate
        self.skipped = 0
        self.on_sample: Callable[[str], None] = ignore

    def assemble(self, task: Task, held: Sequence[Chunk]) -> list[Batch]:
        batches: list[Any] = self._at_once(task.draw) if self._takes_columns else []
        batches = batches or self._one_by_one(task.draw)
        if task.real is not None:
            mark_real(batches, task.real, self._batch_size)
        return batches

    @property
    def _takes_columns(self) -> bool:
        """No transform and no collate asks for single samples, and one dataset gives all."""
        return self._transforms is None and self._collate is None and len(self._layouts) == 1

    def _at_once(self, draw: Draw) -> list[Any]:
        """Whole batches; none where the dataset cannot."""
        starts, items = range(0, len(draw), self._batch_size), self._layouts[0].items
        batches = [items.batch(draw.sample[at : at + self._batch_size]) for at in starts]
        return [] if batches[0] is None else batches

    def _one_by_one(self, draw: Draw) -> list[Any]:
        numbers: list[int] = draw.sample.tolist()
        self.on_sample(f"samples {numbers[:8]}")
        samples = self._some(draw, numbers)
        if self._transforms:
            samples = self._transforms.of(
                samples, named=lambda row: f"sample {numbers[row]}", on_sample=self.on_sample
            )
        collate, size = self._collate or collate_samples, self._batch_size
        return [collate(list(samples[at : at + size])) for at in range(0, len(samples), size)]

    def _some(self, draw: Draw, numbers: list[int]) -> Sequence[Any]:
        if len(self._layouts) == 1:
            return self._checked(self._layouts[0].items.some(numbers), len(numbers))
        of = draw.dataset.tolist()
        samples: list[Any] = [None] * len(numbers)
        for which, layout in enumerate(self._layouts):
            mine = [row for row, dataset in enumerate(of) if dataset == which]
            found = self._checked(
                layout.items.some([numbers[row] for row in mine]) if mine else (), len(mine)
            )
            for row, sample in zip(mine, found, strict=True):
                samples[row] = sample
        return samples

    def _checked(self, found: Any, wanted: int) -> Sequence[Any]:
        """What somebody's `__getitems__` gave, as samples."""
        if not isinstance(found, Iterable) or isinstance(found, (dict, str, bytes)):
            raise UsageError(f"__getitems__ gave {type(found).__name__}, not a list of samples", hint=_GIVE)
        samples = found if isinstance(found, Sequence) else list(found)
        if len(samples) != wanted:
            raise UsageError(
                f"__getitems__ was asked for {wanted} samples and gave {len(samples)}", hint=_GIVE
            )
        return samples


_GIVE = "let it give one sample for each number, in their order"


class NoChunks:
    """Where chunks would be held: items are asked for when their batch is made."""

    bytes = 0

    def __init__(self) -> None:
        self.samples_read = 0

    @property
    def cache(self) -> NoChunks:
        return self

    def for_keys(self, count: int) -> NoChunks:
        return self

    def prefetch(self, keys: Any, *, keep: Any) -> None:
        """Nothing is read ahead of its batch."""

    def hold(self, keys: Sequence[Key]) -> list[Chunk]:
        self.samples_read += len(keys)
        return []
