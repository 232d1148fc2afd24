"""The order of samples: a computed permutation, so no index of the corpus is ever stored.

The samples are cut into `lanes` equal stretches. Position g of an epoch is sample number g div lanes of
lane g mod lanes. Lanes lie in the corpus in strides, so that neighbours in a batch come from far apart. A
lane is cut into chunks, which is what a reader reads at once; it visits its chunks in a permuted order,
and permutes the samples of each `window` of chunks among themselves. All of it is a pure function of
(seed, epoch, samples, lanes, chunk, window): any position can be asked for, and the number of ranks only
decides who reads a lane, never what the global sequence is.

A rank takes the positions that are its own modulo the world size. When that divides the lanes, it needs
its own lanes only: its share of the shards, read in whole chunks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from stoker.errors import UsageError
from stoker.mixing import Integers, key_of, permutation, permuted

SHUFFLES = ("full", "blocks", "off")

# Divisible by the world sizes people use on one and two machines; more lanes mix better and hold more
# memory (one chunk each).
LANES = 24

_CHUNKS, _WITHIN, _PHASE = range(1, 4)  # what a key is for

Key = tuple[int, int, int]  # a chunk: its dataset, first sample and stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Where positions lead, one entry each: the sample, and which of `keys` is the chunk it is in."""

    sample: Integers
    chunk: Integers
    keys: Sequence[Key]

    def __len__(self) -> int:
        return len(self.sample)

    @property
    def dataset(self) -> Integers:
        return np.array([dataset for dataset, _, _ in self.keys], np.int64)[self.chunk]

    @property
    def first(self) -> Integers:
        """The first sample of each one's chunk."""
        return np.array([first for _, first, _ in self.keys], np.int64)[self.chunk]

    def rows(self, rows: Integers) -> Draw:
        """Some of it, or some of it twice, with all chunks."""
        return Draw(sample=self.sample[rows], chunk=self.chunk[rows], keys=self.keys)

    def part(self, rows: slice | Integers) -> Draw:
        """Some of it, with only the chunks those need."""
        chunk = self.chunk[rows]
        used = np.zeros(len(self.keys), bool)
        used[chunk] = True
        number = np.cumsum(used) - 1
        keys = [self.keys[which] for which in np.flatnonzero(used).tolist()]
        return Draw(sample=self.sample[rows], chunk=number[chunk], keys=keys)

    def alone(self) -> Draw:
        """The same samples, each a chunk by itself: for when the chunks do not fit in memory."""
        rows = zip(self.dataset.tolist(), self.sample.tolist(), strict=True)
        numbers = Numbers()
        chunk = [numbers.of((dataset, sample, sample + 1)) for dataset, sample in rows]
        return Draw(sample=self.sample, chunk=np.array(chunk, np.int64), keys=numbers.keys)

    @staticmethod
    def join(draws: Iterable[Draw]) -> Draw:
        """One after the other."""
        numbers, samples, chunks = Numbers(), [_NONE], [_NONE]
        for draw in draws:
            samples.append(draw.sample)
            chunks.append(np.array([numbers.of(key) for key in draw.keys], np.int64)[draw.chunk])
        return Draw(sample=np.concatenate(samples), chunk=np.concatenate(chunks), keys=numbers.keys)


_NONE: Integers = np.empty(0, np.int64)


class Numbers:
    """Numbers chunks as they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}

    def of(self, key: Key) -> int:
        return self._numbers.setdefault(key, len(self._numbers))

    @property
    def keys(self) -> list[Key]:
        return list(self._numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of one dataset."""

    samples: int
    chunk: int = 1024
    lanes: int = LANES
    window: int = 1
    seed: int = 0
    shuffle: str = "full"
    dataset: int = 0
    _starts: Sequence[int] = field(default=(), init=False, compare=False, repr=False)
    # the window each lane is in: it is asked for in stretches
    _latest: dict[int, tuple[tuple[int, int], _Window]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.shuffle not in SHUFFLES:
            raise UsageError(f"shuffle={self.shuffle!r} is unknown", hint=f"use one of {', '.join(SHUFFLES)}")
        if min(self.chunk, self.lanes, self.window) < 1 or self.samples < 0:
            raise UsageError(
                f"an order of {self.samples} samples in {self.lanes} lanes, chunks of {self.chunk} and "
                f"windows of {self.window} is impossible",
                hint="lanes, chunk and window are at least 1",
            )
        object.__setattr__(self, "_starts", self._lane_starts())

    @property
    def positions(self) -> int:
        """Positions in an epoch."""
        return self.samples

    def draw(self, rows: range, *, epoch: int) -> Draw:
        """What lies at these positions of an epoch."""
        if self.shuffle == "off":
            return self._in_disk_order(np.arange(rows.start, rows.stop, rows.step))
        sample, chunk, numbers = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), Numbers()
        for mine, lane, turns in lanes_of(rows, self.lanes):
            sample[mine], chunk[mine] = self.walk(lane, turns, epoch=epoch, numbers=numbers)
        return Draw(sample=sample, chunk=chunk, keys=numbers.keys)

    def walk(self, lane: int, index: Integers, *, epoch: int, numbers: Numbers) -> tuple[Integers, Integers]:
        """Sample number `index` (ascending) of a lane in the order of its epoch, and the chunk of each."""
        size = self.lane_size(lane)
        if self.shuffle != "off":
            # Lanes start at different phases, or all would need their next chunk at the same moment. The
            # phase also moves the short last chunk, which is never permuted, to another place each epoch.
            index = index + key_of(self.seed, epoch, lane, _PHASE) % max(1, size)
            index = np.where(index >= size, index - size, index)
        sample, chunk = np.empty_like(index), np.empty_like(index)
        windows, within = np.divmod(index, self.window * self.chunk)
        for number, rows in _runs(windows):
            window = self._window(lane, epoch, number)
            sample[rows] = window.sample[within[rows]]
            chunk[rows] = np.array([numbers.of(key) for key in window.keys])[window.chunk[within[rows]]]
        return sample, chunk

    def lane_size(self, lane: int) -> int:
        """Samples in a lane: equal but for one."""
        size, left = divmod(self.samples, self.lanes)
        return size + (lane < left)

    def lane_start(self, lane: int) -> int:
        """The first sample of a lane."""
        return self._starts[lane]

    def _lane_starts(self) -> Sequence[int]:
        """A stride near the golden ratio spreads consecutive lanes."""
        stride = _coprime(round(self.lanes * 0.618), self.lanes)
        by_place = sorted(range(self.lanes), key=lambda lane: lane * stride % self.lanes)
        starts, at = [0] * self.lanes, 0
        for lane in by_place:
            starts[lane] = at
            at += self.lane_size(lane)
        return starts

    def _in_disk_order(self, positions: Integers) -> Draw:
        numbers = Numbers()
        chunks, chunk = positions // self.chunk, np.empty_like(positions)
        for number, rows in _runs(chunks):
            first = number * self.chunk
            chunk[rows] = numbers.of((self.dataset, first, min(first + self.chunk, self.samples)))
        return Draw(sample=positions, chunk=chunk, keys=numbers.keys)

    def _window(self, lane: int, epoch: int, number: int) -> _Window:
        at, window = self._latest.get(lane, ((-1, -1), None))
        if window is None or at != (epoch, number):
            window = self._make_window(lane, epoch, number)
            self._latest[lane] = (epoch, number), window
        return window

    def _make_window(self, lane: int, epoch: int, number: int) -> _Window:
        size, start, key = self.lane_size(lane), self.lane_start(lane), key_of(self.seed, epoch, lane)
        span = self.window * self.chunk
        room = min(span, size - number * span)
        chunk, within = np.divmod(np.arange(room), self.chunk)
        if self.shuffle == "full":
            shuffled = permutation(room, key_of(key, _WITHIN, number))
            chunk, within = chunk[shuffled], within[shuffled]
        visited = range(number * self.window, number * self.window + -(-room // self.chunk))
        firsts = np.array([self._visit(turn, size // self.chunk, key) * self.chunk for turn in visited])
        keys = [
            (self.dataset, start + first, start + min(first + self.chunk, size)) for first in firsts.tolist()
        ]
        return _Window(sample=start + firsts[chunk] + within, chunk=chunk, keys=keys)

    def _visit(self, turn: int, whole: int, key: int) -> int:
        """The chunk visited at a turn; a short last one stays where it is."""
        if self.shuffle == "off" or turn >= whole:
            return turn
        return permuted(turn, whole, key_of(key, _CHUNKS))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Window:
    """The samples of a window in their order, and which of its chunks each lies in."""

    sample: Integers
    chunk: Integers
    keys: Sequence[Key]


def lanes_of(rows: range, lanes: int) -> Iterator[tuple[slice, int, Integers]]:
    """The lanes that positions lie in: which of the rows, the lane, and the turns they are at."""
    apart = lanes // math.gcd(lanes, rows.step)  # rows this far apart share a lane
    for column in range(min(apart, len(rows))):
        mine = rows[column::apart]
        turns = mine.start // lanes + np.arange(len(mine)) * (mine.step // lanes)
        yield slice(column, None, apart), mine.start % lanes, turns


def _runs(numbers: Integers) -> Iterator[tuple[int, slice]]:
    """Stretches of equal numbers."""
    cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
    for start, stop in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
        if start < stop:
            yield int(numbers[start]), slice(start, stop)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's rows of each global batch."""

    rank: int
    world: int
    batch: int

    @property
    def global_batch(self) -> int:
        return self.world * self.batch

    def batches(self, positions: int, *, start: int = 0, tail: str = "drop") -> int:
        """Batches from `start` to the end of an epoch: the same number on every rank, always."""
        left = max(0, positions - start)
        return left // self.global_batch if tail == "drop" else -(-left // self.global_batch)

    def rows(self, start: int, count: int) -> range:
        """Positions of this rank's rows in `count` batches from global position `start`."""
        first = start + self.rank
        return range(first, first + count * self.global_batch, self.world)


def lanes_for(world: int) -> int:
    """Lanes such that every rank has some of its own, and other world sizes still divide them."""
    return math.lcm(LANES, world)


def _coprime(near: int, number: int) -> int:
    """The largest number up to `near` that shares no divisor with `number`."""
    return next(n for n in range(max(1, near), 0, -1) if math.gcd(n, number) == 1)
