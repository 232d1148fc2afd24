"""What positions of an order lead to: samples, and the chunks they are read with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.mixing import Integers

Key = tuple[int, int, int]  # a chunk: its dataset, first sample and stop

_NONE: Integers = np.empty(0, np.int64)


def _nothing() -> Integers:
    return _NONE


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Where positions lead, one entry each: the sample, and which of `keys` is the chunk it is in."""

    sample: Integers
    chunk: Integers
    keys: Sequence[Key]
    laps: Integers = field(default_factory=_nothing)  # of a blend: the epoch of each one's dataset

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def dataset(self) -> Integers:
        return np.array([dataset for dataset, _, _ in self.keys], np.int64)[self.chunk]

    def keys_by_turn(self) -> list[Key]:
        """The chunks in the order in which they are first needed."""
        first = np.full(len(self.keys), len(self), np.int64)
        first[self.chunk[::-1]] = np.arange(len(self) - 1, -1, -1)  # of several the last holds
        return [self.keys[which] for which in np.argsort(first, kind="stable").tolist()]

    def rows(self, rows: Integers) -> Draw:
        """Some of it, or some of it twice, with all chunks."""
        laps = self.laps[rows] if len(self.laps) else self.laps
        return Draw(sample=self.sample[rows], chunk=self.chunk[rows], keys=self.keys, laps=laps)

    def part(self, rows: slice | Integers) -> Draw:
        """Some of it, with only the chunks those need."""
        chunk = self.chunk[rows]
        used = np.zeros(len(self.keys), bool)
        used[chunk] = True
        number = np.cumsum(used) - 1
        keys = [self.keys[which] for which in np.flatnonzero(used).tolist()]
        laps = self.laps[rows] if len(self.laps) else self.laps
        return Draw(sample=self.sample[rows], chunk=number[chunk], keys=keys, laps=laps)

    def alone(self) -> Draw:
        """The same samples, each a chunk by itself: for when the chunks do not fit in memory."""
        rows = zip(self.dataset.tolist(), self.sample.tolist(), strict=True)
        numbers = Numbers()
        chunk = [numbers.of((dataset, sample, sample + 1)) for dataset, sample in rows]
        return Draw(sample=self.sample, chunk=np.array(chunk, np.int64), keys=numbers.keys, laps=self.laps)

    @staticmethod
    def join(draws: Iterable[Draw]) -> Draw:
        """One after the other."""
        numbers, samples, chunks, laps = Numbers(), [_NONE], [_NONE], [_NONE]
        for draw in draws:
            samples.append(draw.sample)
            laps.append(draw.laps)
            chunks.append(np.array([numbers.of(key) for key in draw.keys], np.int64)[draw.chunk])
        return Draw(
            sample=np.concatenate(samples),
            chunk=np.concatenate(chunks),
            keys=numbers.keys,
            laps=np.concatenate(laps),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The samples of a window in their order, and which of its chunks each lies in."""

    sample: Integers
    chunk: Integers
    keys: Sequence[Key]


class Numbers:
    """Numbers chunks as they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}

    def of(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    def collect(self, parts: Iterable[tuple[Window, slice]], *, sample: Integers, chunk: Integers) -> None:
        """Fill in the samples of some parts of windows, and the number of each one's chunk."""
        at = 0
        for window, rows in parts:
            found = window.sample[rows]
            here = slice(at, at := at + len(found))
            sample[here] = found
            numbers = [self.of(key) for key in window.keys]
            # most windows are one chunk
            chunk[here] = np.array(numbers)[window.chunk[rows]] if len(numbers) > 1 else numbers[0]

    @property
    def keys(self) -> list[Key]:
        return list(self._numbers)
