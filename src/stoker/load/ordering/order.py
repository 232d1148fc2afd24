"""Shuffle: the order of samples as a computed permutation, so no index of the corpus is ever stored.

The samples are cut into chunks, which is what a reader reads at once, and the chunks are dealt out to lanes
by key, anew for every seed and epoch: a lane holds chunks from all over the corpus. Position g of an epoch
lies in round g div lanes, in which every lane has one turn (`rounds.py`). The samples of each `window` of a
lane's chunks are permuted among themselves. All of it is a pure function of (seed, epoch, samples, cut,
chunk, window, stretch): any position can be asked for.

To be dealt, chunks are shuffled in pools: the corpus is cut into strata, one for each lane; each stratum into
stretches; a pool is one stretch of every stratum, chosen by key. So a node that has just begun needs few
shards, and every pool mixes the whole corpus. The strata begin elsewhere in every epoch. Only a node's share
stays: its lanes hold one part of the corpus, side by side, for the nodes the job was first laid out for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from stoker.errors import UsageError
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.draw import Draw, Key, Numbers, Window
from stoker.load.ordering.rounds import deal, draw_positions
from stoker.mixing import Integers, key_of, permutation, permutations, permuted

SHUFFLES = ("full", "blocks", "off")

# A lane of fewer chunks would be no mix of the corpus: chunks of small datasets are smaller.
_CHUNKS_IN_A_LANE = 16

# A pool is dealt to the lanes in this many hands, each with as many chunks from every stratum, so that the
# beginning of an epoch is like its end; of at most so many from each, or dealing would be slow to begin.
_HANDS, _HAND = 8, 64

_MADE = 1024  # samples whose windows are made together

_DEALT, _INSIDE, _WITHIN, _PHASE, _STRETCHES, _SHIFT, _GAP, _TAIL = range(1, 9)  # what a key is for


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
    # the share of each node in the latest epochs, and the windows each lane is in: asked for again and again
    _shares: dict[tuple[int, int], _NodeShare] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )
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
        if self.shuffle != "off":
            most = max(1, self.samples // (self.lanes * _CHUNKS_IN_A_LANE))
            object.__setattr__(self, "chunk", min(self.chunk, most))

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
        return draw_positions(self, rows, epoch=epoch)

    def deal(self, rows: range, *, epoch: int) -> Draw:
        """What a rank that has every `rows.step`-th row gets, from its own lanes if it can."""
        return self.draw(rows, epoch=epoch) if self.shuffle == "off" else deal(self, rows, epoch=epoch)

    def lane_size(self, lane: int) -> int:
        """Samples in a lane: equal but for one."""
        size, left = divmod(self.samples, self.lanes)
        return size + (lane < left)

    def recut(self, cut: Cut, *, epoch: int) -> Order:
        """The same samples in other lanes."""
        return replace(self, cut=cut)

    def fill(
        self, lane: int, turns: range, *, epoch: int, numbers: Numbers, sample: Integers, chunk: Integers
    ) -> None:
        """Write what the lane comes to at these turns of its epoch."""
        numbers.collect(self._walk(lane, turns, epoch), sample=sample, chunk=chunk)

    def stretches(self, lane: int, turns: range, *, epoch: int) -> Iterator[tuple[int, int, int]]:
        """What a lane needs at these turns: from which turn on, and the samples `first:stop`."""
        share, size = self._share(self.cut.node_of(lane), epoch), self.lane_size(lane)
        begin = (turns.start + share.phases[lane]) % max(1, size)
        length = self.stretch * self.chunk
        index, left = begin, len(turns)
        while left > 0:
            pool = min(index, size - 1) // length
            stop = min((pool + 1) * length, share.rows * self.chunk)
            if index >= stop:  # the rest that fills no chunk
                stop = size
            turn = turns.stop - left
            yield from (
                (turn, first, last) for first, last in share.needed(pool, index >= share.rows * self.chunk)
            )
            left -= stop - index
            index = stop % size

    def _walk(self, lane: int, turns: range, epoch: int) -> Iterator[tuple[Window, slice]]:
        """Parts of the lane's windows."""
        size, span = self.lane_size(lane), self.window * self.chunk
        left = len(turns)
        at = turns.start + self._share(self.cut.node_of(lane), epoch).phases[lane] if left else 0
        while left:
            at = at if at < size else at - size
            number, begin = divmod(at, span)
            count = min(left, min(span, size - number * span) - begin)
            yield self._window(lane, epoch, number), slice(begin, begin + count)
            at, left = at + count, left - count

    def _window(self, lane: int, epoch: int, number: int) -> Window:
        """A window of a lane. Made with those after it: one by one, small ones would take long."""
        made_for, first, windows = self._latest.get(lane, (-1, 0, ()))
        if made_for != epoch or not first <= number < first + len(windows):
            windows = self._make_windows(lane, epoch, number)
            self._latest[lane] = epoch, number, windows
            first = number
        return windows[number - first]

    def _make_windows(self, lane: int, epoch: int, number: int) -> Sequence[Window]:
        size, share = self.lane_size(lane), self._share(self.cut.node_of(lane), epoch)
        span, key = self.window * self.chunk, key_of(self.seed, epoch, lane, _WITHIN)
        room = min(span, size - number * span)
        numbers = range(number, max(number + 1, min(number + -(-_MADE // span), size // span)))
        if self.shuffle == "full" and room > 1:
            within = permutations(room, [key_of(key, one) for one in numbers])
        else:
            within = np.broadcast_to(np.arange(room), (len(numbers), room))
        # none looks at the chunk of each where there is one for all
        chunk = within // self.chunk if self.window > 1 else within
        visited = range(-(-room // self.chunk))
        firsts = [[share.visit(lane, one * self.window + turn) for turn in visited] for one in numbers]
        keys = [
            [
                self._key(first, size - (one * self.window + turn) * self.chunk)
                for turn, first in enumerate(some)
            ]
            for one, some in zip(numbers, firsts, strict=True)
        ]
        shifts = np.array(firsts) - np.arange(len(visited)) * self.chunk
        sample = within + (np.take_along_axis(shifts, chunk, axis=1) if self.window > 1 else shifts)
        return [Window(sample=s, chunk=c, keys=k) for s, c, k in zip(sample, chunk, keys, strict=True)]

    def _key(self, first: int, left: int) -> Key:
        return self.dataset, first, first + min(self.chunk, left)

    def _share(self, node: int, epoch: int) -> _NodeShare:
        found = self._shares.get((node, epoch))
        if found is None:
            if len(self._shares) > 2 * self.cut.nodes:
                self._shares.clear()
            found = self._shares[node, epoch] = _node_share(self, node, epoch)
        return found

    def _in_disk_order(self, positions: Integers) -> Draw:
        first, last = positions[:1].sum() // self.chunk, positions[-1:].sum() // self.chunk
        starts = range(int(first) * self.chunk, int(last + 1) * self.chunk, self.chunk)
        keys = [(self.dataset, start, min(start + self.chunk, self.samples)) for start in starts]
        return Draw(sample=positions, chunk=positions // self.chunk - first, keys=keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class _NodeShare:
    """The part of the corpus that a node's lanes hold, in one epoch: `rows` of whole chunks, one in each
    lane, and a rest that is cut into a piece for each lane, at a `gap` between the chunks."""

    first: int  # sample
    chunk: int
    rows: int
    stretch: int
    rest: int
    gap: int  # chunks before the rest
    shift: int  # chunks before the first stratum
    key: int
    place: dict[int, int]  # of each lane among those of its node
    pieces: dict[int, int]  # each lane's first sample of the rest
    phases: dict[int, int]  # where each lane begins

    def visit(self, lane: int, turn: int) -> int:
        """The first sample of the chunk that a lane visits at a turn; after those, of its rest."""
        if turn >= self.rows:
            return self.pieces[lane] + (turn - self.rows) * self.chunk
        pool, row = divmod(turn, self.stretch)
        lanes, rows = len(self.place), min(self.stretch, self.rows - pool * self.stretch)
        each = max(1, min(_HAND, rows // _HANDS))
        hand, row = divmod(row, each)
        size = lanes * min(each, rows - hand * each)
        dealt = _permuted(row * lanes + self.place[lane], size, _key(self.key, _DEALT, pool, hand))
        number, stratum = divmod(dealt, lanes)
        inside = _permuted(hand * each + number, rows, _key(self.key, _INSIDE, pool, stratum))
        return self._sample(self._stretch(pool, stratum) + inside)

    def needed(self, pool: int, is_rest: bool) -> Iterator[tuple[int, int]]:
        """The samples that a pool holds, or the rest: stretches of them."""
        if is_rest:
            start = self.first + self.gap * self.chunk
            yield start, start + self.rest
            return
        chunks = min(self.stretch, self.rows - pool * self.stretch)
        for stratum in range(len(self.place)):
            begin = self._stretch(pool, stratum)
            breaks = {begin, begin + chunks}
            total = self.rows * len(self.place)
            # a stretch may lie across the end, where it goes on at the beginning, and across the rest
            for place in (total - self.shift, (self.gap - self.shift) % total):
                breaks |= {place} & set(range(begin, begin + chunks))
            edges = sorted(breaks)
            for low, high in pairwise(edges):
                yield self._sample(low), self._sample(high - 1) + self.chunk

    def _stretch(self, pool: int, stratum: int) -> int:
        """The first chunk of a stratum's stretch in a pool; a short last one stays where it is."""
        whole = self.rows // self.stretch
        if whole > 1 and pool < whole:
            pool = _permuted(pool, whole, _key(self.key, _STRETCHES, stratum))
        return stratum * self.rows + pool * self.stretch

    def _sample(self, chunk: int) -> int:
        place = (chunk + self.shift) % (self.rows * len(self.place))
        return self.first + place * self.chunk + (self.rest if place >= self.gap else 0)


def _node_share(order: Order, node: int, epoch: int) -> _NodeShare:
    lanes = [lane for lane in range(order.lanes) if order.cut.node_of(lane) == node]
    before = sum(order.lane_size(lane) for lane in range(order.lanes) if order.cut.node_of(lane) < node)
    key = key_of(order.seed, epoch, node)
    least = order.samples // order.lanes
    is_drawn = order.shuffle != "off"  # in a blend; otherwise all of a node's share is one rest
    rows = least // order.chunk if is_drawn else 0
    gap = key_of(key, _GAP) % (rows * len(lanes) + 1)
    pieces, at = {}, before + gap * order.chunk
    for number in permutation(len(lanes), key_of(key, _TAIL)).tolist() if is_drawn else range(len(lanes)):
        pieces[lanes[number]] = at
        at += order.lane_size(lanes[number]) - rows * order.chunk
    # All lanes begin at one place of the epoch, so that they are in one pool, but each at another sample of
    # its window, or all would need their next chunk at the same moment.
    common, span = key_of(key, _PHASE) % max(1, least), order.window * order.chunk
    phases = {
        lane: (common + key_of(key, _PHASE, lane) % span) % max(1, order.lane_size(lane)) if is_drawn else 0
        for lane in lanes
    }
    return _NodeShare(
        first=before,
        chunk=order.chunk,
        rows=rows,
        stretch=order.stretch,
        rest=sum(map(order.lane_size, lanes)) - rows * order.chunk * len(lanes),
        gap=gap,
        shift=key_of(key, _SHIFT) % max(1, rows * len(lanes)),
        key=key,
        place={lane: number for number, lane in enumerate(lanes)},
        pieces=pieces,
        phases=phases,
    )


_LISTED = 1 << 12  # numbers permuted by sorting, which mixes small sets better; more would take memory


def _permuted(number: int, size: int, key: int) -> int:
    return int(_listed(size, key)[number]) if size <= _LISTED else permuted(number, size, key)


_key = lru_cache(4096)(key_of)  # the lanes of a node ask for the same ones


@lru_cache(512)
def _listed(size: int, key: int) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    return permutation(size, key).astype(np.uint16)  # a quarter of the memory: 4 MiB at most
