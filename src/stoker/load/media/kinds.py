"""Kinds of media: what an orchestrator of samples asks of images, sounds and videos."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stoker.load.media.boxes import keys_of
from stoker.load.ordering.plan import Task
from stoker.mixing import Keys, key_of

Sample = dict[str, Any]

_NAMED = 8  # of those that could not be decoded, in the report


class Filling(Protocol):
    """The rows of one task, of one kind. `decode` and `blank` are called by any thread, once for a row."""

    @property
    def columns(self) -> dict[str, Any]:
        """Arrays over all rows, of what is of one size."""

    def decode(self, row: int, data: Any) -> dict[str, Any]: ...
    def blank(self, row: int) -> dict[str, Any]:
        """What comes in the place of one that cannot be decoded."""

    def finish(self) -> dict[int, str]:
        """What was left until all rows had been looked at, by the thread that assembles: rows that cannot be
        decoded after all, and why. They are blank; `columns` are complete afterwards."""


class Kind(Protocol):
    """Images, sounds or videos. `begin` is called by the thread that assembles."""

    what: str
    policy: str
    member: str  # which one is meant; empty: the one of these suffixes

    @property
    def suffixes(self) -> Sequence[Sequence[str]]:
        """Of the first of these that a sample has."""

    @property
    def columns(self) -> Collection[str]: ...
    @property
    def taken(self) -> Collection[str]:
        """Names that a sample's own members may not have."""

    @property
    def is_even(self) -> bool:
        """Whether all are of one size."""

    def begin(self, task: Task) -> Filling: ...
    def count(self, wrong: str) -> None: ...
    def evened(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Columns of a batch whose rows are of unlike lengths, filled up."""


def keys_of_task(task: Task, *, seed: int, what: int) -> Keys:
    """One key for each row: of the seed, the epoch, the dataset and the sample."""
    draw = task.draw
    epochs = draw.laps if len(draw.laps) else np.full(len(draw), task.epoch, np.int64)
    return keys_of(seed=key_of(seed), epochs=epochs, datasets=draw.dataset, samples=draw.sample, what=what)


@dataclass(slots=True)
class Troubles:
    """What could not be decoded: how much, and some by name."""

    count: int = 0
    named: tuple[str, ...] = ()

    def add(self, wrong: str) -> None:
        self.count += 1
        if len(self.named) < _NAMED and wrong not in self.named:
            self.named = (*self.named, wrong)
