"""DALI's pipelines, fed by stoker: verified bytes, in the computed order, with a position that can be saved.

    source = stoker.integrations.dali.source("images", batch_size=256)

    @pipeline_def(batch_size=256, num_threads=4, device_id=0)
    def train():
        jpegs, labels = fn.external_source(source, num_outputs=2)
        ...

    for step in range(...):
        pixels, labels = pipeline.run()      # StopIteration at the end of an epoch; then pipeline.reset()
        state = source.state_dict(used=step + 1)

A pipeline asks ahead of what it gives: `used` says how many of its batches were used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from stoker.errors import BadShardError, UsageError
from stoker.load.loader import Loader

_AHEAD = 256  # batches that a pipeline may have asked for and not given; it asks for two to ten


class Source:
    """Batches of members for `fn.external_source`. Call it, `close` (or use as a context manager)."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._batches: Iterator[Any] | None = None
        self._given = 0
        self._states: deque[dict[str, Any]] = deque([loader.state_dict()], maxlen=_AHEAD)

    def __call__(self) -> tuple[list[Any], ...]:
        """The next batch: of each member one array for each sample. StopIteration ends an epoch."""
        batches: Iterator[Any] = self._batches or iter(self._loader)
        self._batches = batches
        try:
            batch: tuple[list[Any], ...] = next(batches)
        except StopIteration:
            self._batches = None
            raise
        self._given += 1
        self._states.append(self._loader.state_dict())
        return batch

    def __len__(self) -> int:
        """Batches in an epoch."""
        return len(self._loader)

    def state_dict(self, *, used: int) -> dict[str, Any]:
        """Where the job is once so many batches, counted since the source began or was loaded, were used."""
        ahead = self._given - used
        if not 0 <= ahead < len(self._states):
            raise UsageError(
                f"used={used}: {self._given:,} batches were asked for, and the latest {len(self._states):,} "
                "states are kept",
                hint="say how many batches the pipeline has given, since the source began or was loaded",
            )
        return self._states[-1 - ahead]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved position, on any number of ranks: build or reset the pipeline after it."""
        self._loader.load_state_dict(state)
        self._batches, self._given = None, 0
        self._states.clear()
        self._states.append(state)

    def close(self) -> None:
        self._loader.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def source(
    dataset: Any,  # what `stoker.Loader` takes
    *,
    batch_size: int,
    members: Sequence[str] = ("jpg", "cls"),
    **options: Any,  # the rest of its options
) -> Source:
    """What `fn.external_source` asks for batches. `cls` comes as a number, other members as bytes."""
    for name in ("collate", "image", "output"):
        if name in options:
            raise UsageError(
                f"a source for DALI takes no {name}=: the pipeline decodes",
                hint=f"leave {name}= out, or use stoker.feed",
            )

    def collate(samples: list[dict[str, bytes]]) -> tuple[list[Any], ...]:
        return tuple([_array(sample, name) for sample in samples] for name in members)

    return Source(Loader(dataset, batch_size=batch_size, collate=collate, output="numpy", **options))


def _array(sample: dict[str, bytes], name: str) -> Any:
    if name not in sample:
        raise BadShardError(
            f"sample {sample['__key__']!r} has no member {name}, but {', '.join(list(sample)[1:])}",
            hint="name the members with members=, in the order in which the pipeline takes them",
        )
    if name != "cls":
        return np.frombuffer(sample[name], np.uint8)
    try:
        return np.array([int(sample[name])], np.int64)
    except ValueError:
        raise BadShardError(
            f"the label of sample {sample['__key__']!r} is {sample[name][:40]!r}, no whole number",
            hint="a member `cls` holds the number of a class in ASCII",
        ) from None
