"""The order of samples: a computed permutation, so no index of the corpus is ever stored.

The samples are cut into lanes of equal size. Position g of an epoch is sample number g div lanes of lane
g mod lanes. Lanes lie in the corpus in strides, so that neighbours in a batch come from far apart. A lane is
cut into stretches, which it visits in a permuted order: so a node that has just begun needs few shards. A
stretch is cut into chunks, which is what a reader reads at once, also visited in a permuted order; and the
samples of each `window` of chunks are permuted among themselves. All of it is a pure function of (seed,
epoch, samples, lanes, chunk, window, stretch): any position can be asked for, and the number of ranks only
decides who reads a lane, never what the global sequence is.

A rank takes the positions that are its own modulo the world size. When that divides the lanes, it needs its
own lanes only: its share of the shards, read in whole chunks. The lanes of a node's ranks lie side by side,
for the nodes the job was first laid out for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from stoker.errors import UsageError
from stoker.mixing import Integers, key_of, permutations, permuted

SHUFFLES = ("full", "blocks", "off")

# Divisible by the world sizes people use on one and two machines; more lanes mix better and hold more
# memory (one chunk each).
LANES = 24

_CHUNKS, _WITHIN, _PHASE, _STRETCHES = range(1, 5)  # what a key is for

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How samples are cut into lanes, for the ranks and nodes a job first ran on. It belongs to the order: a
    job that goes on elsewhere keeps it."""

    lanes: int = LANES
    ranks: int = 1
    nodes: int = 1

    def node_of(self, lane: int) -> int:
        """Whose ranks read a lane; 0 where nodes have different numbers of ranks."""
        each, left = divmod(self.ranks, self.nodes)
        return 0 if left else lane % self.ranks // each

    @classmethod
    def for_world(cls, ranks: int, nodes: int, *, lanes: int = 0) -> Cut:
        """Lanes such that every rank has some of its own, and other world sizes still divide them."""
        return cls(lanes=lanes or math.lcm(LANES, ranks), ranks=ranks, nodes=nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of one dataset."""

    samples: int
    chunk: int = 1024
    cut: Cut = field(default_factory=Cut)
    window: int = 1
    stretch: int = 512  # chunks
    seed: int = 0
    shuffle: str = "full"
    dataset: int = 0
    _starts: Sequence[int] = field(default=(), init=False, compare=False, repr=False)
    # the window each lane is in: it is asked for in stretches
    _latest: dict[int, tuple[int, int, Sequence[Window]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.shuffle not in SHUFFLES:
            raise UsageError(f"shuffle={self.shuffle!r} is unknown", hint=f"use one of {', '.join(SHUFFLES)}")
        if min(self.chunk, self.lanes, self.window, self.stretch) < 1 or self.samples < 0:
            raise UsageError(
                f"an order of {self.samples} samples in {self.lanes} lanes, chunks of {self.chunk} and "
                f"windows of {self.window} is impossible",
                hint="lanes, chunk and window are at least 1",
            )
        object.__setattr__(self, "_starts", self._lane_starts())

    @property
    def lanes(self) -> int:
        return self.cut.lanes

    @property
    def positions(self) -> int:
        """Positions in an epoch."""
        return self.samples

    def draw(self, rows: range, *, epoch: int) -> Draw:
        """What lies at these positions of an epoch."""
        if self.shuffle == "off":
            return self._in_disk_order(np.arange(rows.start, rows.stop, rows.step))
        shares, numbers = list(lanes_of(rows, self.lanes)), Numbers()
        # lane by lane first, then all at once to where they belong
        samples, chunks = np.empty((2, len(shares), -(-len(rows) // max(1, len(shares)))), np.int64)
        for sample, chunk, (_, lane, turns) in zip(samples, chunks, shares, strict=True):
            numbers.collect(self.walk(lane, turns, epoch=epoch), sample=sample, chunk=chunk)
        sample, chunk = (lanes.T.reshape(-1)[: len(rows)] for lanes in (samples, chunks))
        return Draw(sample=sample, chunk=chunk, keys=numbers.keys)

    def walk(self, lane: int, turns: range, *, epoch: int) -> Iterator[tuple[Window, slice]]:
        """What a lane comes to at these turns of its epoch: parts of its windows."""
        size, span = self.lane_size(lane), self.window * self.chunk
        at, left = turns.start, len(turns)
        if self.shuffle != "off":
            # Lanes start at different phases, or all would need their next chunk at the same moment. The
            # phase also moves the short last chunk, which is never permuted, to another place each epoch.
            at += self._phase(lane, epoch)
        while left:
            number, begin = divmod(at if at < size else at - size, span)
            room = min(span, size - number * span)
            count = min(left, -(-(room - begin) // turns.step))
            yield (
                self._window(lane, epoch, number),
                slice(begin, begin + count * turns.step, turns.step),
            )
            at, left = at + count * turns.step, left - count

    def lane_size(self, lane: int) -> int:
        """Samples in a lane: equal but for one."""
        size, left = divmod(self.samples, self.lanes)
        return size + (lane < left)

    def lane_start(self, lane: int) -> int:
        """The first sample of a lane."""
        return self._starts[lane]

    def stretches(self, lane: int, *, epoch: int) -> Iterator[tuple[range, int, int]]:
        """The stretches of a lane: the turns at which it is in each, and the samples `first:stop`."""
        size, start, key = self.lane_size(lane), self.lane_start(lane), key_of(self.seed, epoch, lane)
        length, phase = self.stretch * self.chunk, self._phase(lane, epoch)
        for number, index in enumerate(range(0, size, length)):
            stop = min(index + length, size)
            # it begins in the middle of one, whose beginning comes last
            turn = 0 if index <= phase < stop else (index - phase) % size
            first = self._stretch(number, size, key) * length
            yield range(turn, turn + stop - index), start + first, start + min(first + length, size)

    def _phase(self, lane: int, epoch: int) -> int:
        return _phase_key(self.seed, epoch, lane) % max(1, self.lane_size(lane))

    def _lane_starts(self) -> Sequence[int]:
        """A stride near the golden ratio spreads consecutive lanes, among those of their node."""
        stride = _coprime(round(self.lanes * 0.618), self.lanes)
        by_place = sorted(
            range(self.lanes), key=lambda lane: (self.cut.node_of(lane), lane * stride % self.lanes)
        )
        starts, at = [0] * self.lanes, 0
        for lane in by_place:
            starts[lane] = at
            at += self.lane_size(lane)
        return starts

    def _in_disk_order(self, positions: Integers) -> Draw:
        first, last = positions[:1].sum() // self.chunk, positions[-1:].sum() // self.chunk
        starts = range(int(first) * self.chunk, int(last + 1) * self.chunk, self.chunk)
        keys = [(self.dataset, start, min(start + self.chunk, self.samples)) for start in starts]
        return Draw(sample=positions, chunk=positions // self.chunk - first, keys=keys)

    def _window(self, lane: int, epoch: int, number: int) -> Window:
        """A window of a lane. Made with those after it: one by one, small ones would take long."""
        made_for, first, windows = self._latest.get(lane, (-1, 0, ()))
        if made_for != epoch or not first <= number < first + len(windows):
            windows = self._make_windows(lane, epoch, number)
            self._latest[lane] = epoch, number, windows
            first = number
        return windows[number - first]

    def _make_windows(self, lane: int, epoch: int, number: int) -> Sequence[Window]:
        size, start, key = self.lane_size(lane), self.lane_start(lane), key_of(self.seed, epoch, lane)
        span = self.window * self.chunk
        room = min(span, size - number * span)
        numbers = range(number, max(number + 1, min(number + -(-_MADE // span), size // span)))
        if self.shuffle == "full":
            within = permutations(room, [key_of(key, _WITHIN, one) for one in numbers])
        else:
            within = np.broadcast_to(np.arange(room), (len(numbers), room))
        # none looks at the chunk of each where there is one for all
        chunk = within // self.chunk if self.window > 1 else within
        visited = range(-(-room // self.chunk))
        firsts = [[self._visit(one * self.window + turn, size, key) for turn in visited] for one in numbers]
        keys = [
            [(self.dataset, start + first, start + min(first + self.chunk, size)) for first in some]
            for some in firsts
        ]
        shifts = start + np.array(firsts) - np.arange(len(visited)) * self.chunk
        sample = within + (np.take_along_axis(shifts, chunk, axis=1) if self.window > 1 else shifts)
        return [Window(sample=s, chunk=c, keys=k) for s, c, k in zip(sample, chunk, keys, strict=True)]

    def _visit(self, turn: int, size: int, key: int) -> int:
        """The first sample of the chunk visited at a turn; a short last one stays where it is."""
        if self.shuffle == "off" or turn >= size // self.chunk:
            return turn * self.chunk
        number, turn = divmod(turn, self.stretch)
        number = self._stretch(number, size, key)
        chunks = min(self.stretch, size // self.chunk - number * self.stretch)
        return (number * self.stretch + permuted(turn, chunks, key_of(key, _CHUNKS, number))) * self.chunk

    def _stretch(self, turn: int, size: int, key: int) -> int:
        """The stretch visited at a turn; a short last one stays where it is."""
        whole = size // (self.stretch * self.chunk)
        return permuted(turn, whole, key_of(key, _STRETCHES)) if turn < whole else turn


@lru_cache(4096)  # asked for with every draw
def _phase_key(seed: int, epoch: int, lane: int) -> int:
    return key_of(seed, epoch, lane, _PHASE)


# Samples whose windows are made together.
_MADE = 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The samples of a window in their order, and which of its chunks each lies in."""

    sample: Integers
    chunk: Integers
    keys: Sequence[Key]


def lanes_of(rows: range, lanes: int) -> Iterator[tuple[slice, int, range]]:
    """The lanes that positions lie in: which of the rows, the lane, and the turns they are at."""
    apart = lanes // math.gcd(lanes, rows.step)  # rows this far apart share a lane
    for column in range(min(apart, len(rows))):
        mine = rows[column::apart]
        step = mine.step // lanes
        first = mine.start // lanes
        yield slice(column, None, apart), mine.start % lanes, range(first, first + len(mine) * step, step)


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


def _coprime(near: int, number: int) -> int:
    """The largest number up to `near` that shares no divisor with `number`."""
    return next(n for n in range(max(1, near), 0, -1) if math.gcd(n, number) == 1)
