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
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import UsageError

Integers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

SHUFFLES = ("full", "blocks", "off")

# Divisible by the world sizes people use on one and two machines; more lanes mix better and hold more
# memory (one chunk each).
LANES = 24

_CHUNKS, _WITHIN, _PHASE, _BLEND = range(1, 5)  # what a key is for


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Where positions lead, one entry each: the sample, and the chunk `first:stop` it is read with."""

    sample: Integers
    first: Integers
    stop: Integers
    dataset: Integers

    def __len__(self) -> int:
        return len(self.sample)


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of one dataset."""

    samples: int
    chunk: int = 1024
    lanes: int = LANES
    window: int = 1
    seed: int = 0
    shuffle: str = "full"

    def __post_init__(self) -> None:
        if self.shuffle not in SHUFFLES:
            raise UsageError(f"shuffle={self.shuffle!r} is unknown", hint=f"use one of {', '.join(SHUFFLES)}")
        if min(self.chunk, self.lanes, self.window) < 1 or self.samples < 0:
            raise UsageError(
                f"an order of {self.samples} samples in {self.lanes} lanes, chunks of {self.chunk} and "
                f"windows of {self.window} is impossible",
                hint="lanes, chunk and window are at least 1",
            )

    @property
    def positions(self) -> int:
        """Positions in an epoch."""
        return self.samples

    def draw(self, positions: Integers, *, epoch: int) -> Draw:
        """What lies at these positions of an epoch."""
        if self.shuffle == "off":
            first = positions - positions % self.chunk
            stop = np.minimum(first + self.chunk, self.samples)
            return Draw(sample=positions, first=first, stop=stop, dataset=np.zeros_like(positions))
        turn, lanes = np.divmod(positions, self.lanes)
        # all of one epoch: what depends on the lane alone is computed once a lane, not once a position
        each = np.arange(self.lanes)
        keys = mix(self.seed, epoch, each)
        phases = _below(self.lane_sizes(each), mix(keys, _PHASE))
        return self._draw(lanes, turn, keys[lanes], mix(keys, _CHUNKS)[lanes], phases[lanes])

    def draw_in_lanes(self, lanes: Integers, index: Integers, epochs: Integers) -> Draw:
        """Sample number `index` of each lane, in the order of its epoch."""
        keys = mix(self.seed, epochs, lanes)
        phases = _below(self.lane_sizes(lanes), mix(keys, _PHASE))
        return self._draw(lanes, index, keys, mix(keys, _CHUNKS), phases)

    def lane_sizes(self, lanes: Integers) -> Integers:
        """Samples in each of these lanes: equal but for one."""
        size, left = divmod(self.samples, self.lanes)
        return size + (lanes < left)

    def lane_starts(self) -> Integers:
        """The first sample of each lane. A stride near the golden ratio spreads consecutive lanes."""
        places = np.arange(self.lanes) * _coprime(round(self.lanes * 0.618), self.lanes) % self.lanes
        sizes = np.empty(self.lanes, np.int64)
        sizes[places] = self.lane_sizes(np.arange(self.lanes))
        starts: Integers = (np.cumsum(sizes) - sizes)[places]
        return starts

    def _draw(self, lanes: Integers, index: Integers, keys: Keys, chunk_keys: Keys, phases: Integers) -> Draw:
        size, start = self.lane_sizes(lanes), self.lane_starts()[lanes]
        if self.shuffle == "off":
            chunk, within = np.divmod(index, self.chunk)
        else:
            # Lanes start at different phases, or all would need their next chunk at the same moment. The
            # phase also moves the short last chunk, which is never permuted, to another place each epoch.
            index = index + phases
            chunk, within = self._shuffled(
                np.where(index >= size, index - size, index), size, keys, chunk_keys
            )
        first = chunk * self.chunk
        return Draw(
            sample=start + first + within,
            first=start + first,
            stop=start + np.minimum(first + self.chunk, size),
            dataset=np.zeros_like(lanes),
        )

    def _shuffled(
        self, index: Integers, size: Integers, keys: Keys, chunk_keys: Keys
    ) -> tuple[Integers, Integers]:
        """The chunk each index leads to, and the place in it."""
        span = self.window * self.chunk
        group, within = np.divmod(index, span)
        if self.shuffle == "full":
            room = np.minimum(span, size - group * span)
            within = permute(within, room, mix(keys, _WITHIN, group))
        if self.window > 1:
            step, within = np.divmod(within, self.chunk)
            group = group * self.window + step
        whole = size // self.chunk
        chunk = np.where(group < whole, permute(np.minimum(group, whole - 1), whole, chunk_keys), group)
        return chunk, within


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Several datasets, mixed by weight. Every lane deals them out by one repeating pattern, so the
    shares hold over any stretch, and each dataset goes through epochs of its own."""

    orders: tuple[Order, ...]
    weights: tuple[float, ...]
    pattern: Integers
    before: Integers
    share: Integers
    seed: int

    @property
    def lanes(self) -> int:
        return self.orders[0].lanes

    @property
    def positions(self) -> int:
        """One epoch of a blend is as many samples as its datasets hold together."""
        total = sum(order.samples for order in self.orders)
        return total - total % self.lanes

    def draw(self, positions: Integers, *, epoch: int) -> Draw:
        turn, lanes = np.divmod(positions + epoch * self.positions, self.lanes)
        shift = _below(np.full_like(lanes, len(self.pattern)), mix(self.seed, _BLEND, lanes))
        cycle, place = np.divmod(turn + shift, len(self.pattern))
        dataset = self.pattern[place]
        skipped = self.before[dataset, shift]
        number = cycle * self.share[dataset] + self.before[dataset, place] - skipped
        return self._draw_each(lanes, dataset, number)

    def _draw_each(self, lanes: Integers, dataset: Integers, number: Integers) -> Draw:
        sample, first, stop = np.empty_like(lanes), np.empty_like(lanes), np.empty_like(lanes)
        for which, order in enumerate(self.orders):
            mine = np.flatnonzero(dataset == which)
            epochs, index = np.divmod(number[mine], order.lane_sizes(lanes[mine]))
            drawn = order.draw_in_lanes(lanes[mine], index, epochs)
            sample[mine], first[mine], stop[mine] = drawn.sample, drawn.first, drawn.stop
        return Draw(sample=sample, first=first, stop=stop, dataset=dataset)


# Places in a blend's pattern: weights are kept to one part in this many.
_PATTERN = 4096


def make_blend(orders: tuple[Order, ...], weights: tuple[float, ...], *, seed: int = 0) -> Blend:
    """A blend of datasets; the weights need not sum to one."""
    _check_blend(orders, weights)
    share = _apportion(weights, _PATTERN)
    sorted_pattern = np.repeat(np.arange(len(orders)), share)
    places = permute(
        np.arange(_PATTERN), np.full(_PATTERN, _PATTERN), mix(seed, _BLEND, np.zeros(_PATTERN, int))
    )
    pattern = sorted_pattern[places]
    chosen = pattern == np.arange(len(orders))[:, None]
    before = np.cumsum(chosen, axis=1) - chosen
    return Blend(orders=orders, weights=weights, pattern=pattern, before=before, share=share, seed=seed)


def _check_blend(orders: tuple[Order, ...], weights: tuple[float, ...]) -> None:
    if len(orders) != len(weights) or not orders or any(not weight > 0 for weight in weights):
        raise UsageError(
            f"{len(orders)} datasets and weights {weights} do not make a blend",
            hint="give one positive weight per dataset",
        )
    smallest = min(order.samples for order in orders)
    if smallest < orders[0].lanes or len({order.lanes for order in orders}) > 1:
        raise UsageError(
            f"a dataset of {smallest} samples cannot fill {orders[0].lanes} lanes",
            hint="give every dataset of a blend the same number of lanes, at most its number of samples",
        )


def _apportion(weights: tuple[float, ...], places: int) -> Integers:
    """Whole numbers that sum to `places`, each as near to its weight as it can be, and at least one."""
    exact = np.array(weights) / sum(weights) * places
    share = np.maximum(np.floor(exact).astype(np.int64), 1)
    for which in np.argsort(share - exact)[: places - int(share.sum())]:
        share[which] += 1
    share[np.argmax(share)] += places - int(share.sum())
    return share


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

    def rows(self, start: int, count: int) -> Integers:
        """Positions of this rank's rows in `count` batches from global position `start`."""
        steps = np.arange(count * self.batch, dtype=np.int64)
        return start + self.rank + steps * self.world


def lanes_for(world: int) -> int:
    """Lanes such that every rank has some of its own, and other world sizes still divide them."""
    return math.lcm(LANES, world)


def _coprime(near: int, number: int) -> int:
    """The largest number up to `near` that shares no divisor with `number`."""
    return next(n for n in range(max(1, near), 0, -1) if math.gcd(n, number) == 1)


def permute(index: Integers, size: Integers, keys: Keys) -> Integers:
    """A bijection of [0, size), one per key, applied to each index.

    Rounds of (fold the high bits down, multiply by an odd number, add) are bijections of the numbers of
    so many bits; an image outside the range is sent round again until it falls inside (cycle walking),
    which takes under two rounds on average.
    """
    bits = np.maximum(np.frexp(np.maximum(size - 1, 1).astype(np.float64))[1], 2).astype(np.uint64)
    mask = (np.uint64(1) << bits) - np.uint64(1)
    half = (bits + np.uint64(1)) >> np.uint64(1)
    limit = size.astype(np.uint64)
    image = _scramble(index.astype(np.uint64), half, mask, keys)
    outside = np.flatnonzero(image >= limit)
    while len(outside):
        image[outside] = _scramble(image[outside], half[outside], mask[outside], keys[outside])
        outside = outside[image[outside] >= limit[outside]]
        if not size.all():  # an empty range has no image; such an entry is the caller's to ignore
            outside = outside[limit[outside] > 0]
    return image.astype(np.int64)


def _scramble(value: Keys, half: Keys, mask: Keys, keys: Keys) -> Keys:
    for turn in range(4):
        factor = (keys >> np.uint64(7 * turn)) | np.uint64(1)
        value = (value * factor + (keys >> np.uint64(32 + 5 * turn))) & mask
        value ^= value >> half
    return value


def mix(*parts: Any) -> Keys:  # integers, or arrays of them
    """One well-mixed 64-bit key from several numbers (splitmix64 steps)."""
    with np.errstate(over="ignore"):
        key = np.asarray(0x9E3779B97F4A7C15, np.uint64)
        for part in parts:
            key = (key ^ _as_key(part)) + np.uint64(0x9E3779B97F4A7C15)
            key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            key = key ^ (key >> np.uint64(31))
    return np.atleast_1d(key)


def _as_key(part: Any) -> Keys:  # an integer or an array of them
    if isinstance(part, int):
        return np.asarray(part & 0xFFFFFFFFFFFFFFFF, np.uint64)
    return np.asarray(part).astype(np.uint64)


def _below(size: Integers, keys: Keys) -> Integers:
    """A number in [0, size) from each key; 0 for an empty range."""
    return (keys % np.maximum(size, 1).astype(np.uint64)).astype(np.int64)
