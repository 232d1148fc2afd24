"""Dataset blending: several datasets, mixed by weights that may change on the way.

Which dataset comes at a position `dealing.py` says; its samples come in the order they have when it is
read alone, each once before one comes again. So the samples at a position are the same for any number of
ranks. The ranks share the rows of a global batch out such that each gets, as far as it can, samples of its
own lanes; the few that are left over are read one by one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from stoker.errors import UsageError
from stoker.formats.sizes import counted
from stoker.load.ordering.dealing import Dealing, Stage
from stoker.load.ordering.draw import Draw, Numbers
from stoker.load.ordering.order import Order
from stoker.load.ordering.rounds import Share, lanes_of
from stoker.load.ordering.schedule import Mixture, Schedule
from stoker.mixing import Integers


@dataclass(kw_only=True)
class _Shared:
    """How rows were shared out so far, for the report."""

    rows: int = 0
    strays: int = 0  # of lanes that are another rank's


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Several orders as one; `share` says which rank draws."""

    orders: tuple[Order, ...]
    dealing: Dealing
    share: Share = field(default_factory=lambda: Share(rank=0, world=1, batch=1))
    size: int = 0  # positions of an epoch, if some samples are left out
    moved: Mapping[int, int] = field(default_factory=dict)  # positions of which others take the place
    _shared: _Shared = field(default_factory=_Shared, init=False, compare=False, repr=False)

    @property
    def samples(self) -> int:
        """One epoch of a blend is as many samples as its datasets hold together."""
        return sum(order.samples for order in self.orders)

    @property
    def positions(self) -> int:
        return self.size or self.samples

    @property
    def read_factor(self) -> float:
        """How often a sample is read by all ranks together, as far as they have come."""
        return 1 + self._shared.strays / max(1, self._shared.rows)

    def draw(self, rows: range, *, epoch: int) -> Draw:
        """What lies at these positions of an epoch: a blend goes on where its last epoch ended."""
        if not rows:
            return Draw.join(())
        whole, _ = self._draw_all(self._global(rows.start, rows[-1] + 1, epoch))
        return whole if rows.step == 1 else whole.part(slice(None, None, rows.step))

    def deal(self, rows: range, *, epoch: int) -> Draw:
        """This rank's rows of the global batches that these are its rows of, from its own lanes if it can."""
        share, first = self.share, rows.start - self.share.rank
        if share.world == 1 or self.orders[0].shuffle == "off":
            return self.draw(rows, epoch=epoch)
        # a last batch that is not full is not shared out by lanes: all ranks agree on which it is
        whole = min(len(rows) // share.batch, (self.positions - first) // share.global_batch)
        drawn, lanes = self._draw_all(self._global(first, first + whole * share.global_batch, epoch))
        mine, strays = _share_out(lanes % share.world, share)
        self._shared.rows += len(mine)
        self._shared.strays += int(strays.sum())
        shared, rest = _alone_where(drawn.part(mine), strays), rows[whole * share.batch :]
        return Draw.join([shared, self.draw(rest, epoch=epoch)]) if rest else shared

    def reached(self, which: int, position: int, *, epoch: int) -> tuple[int, int]:
        """The epoch that a dataset is in, and its position there, when the blend is at a position."""
        counts = self.dealing.counts(epoch * self.samples + position)
        return divmod(counts[which], self.orders[which].samples)

    def _global(self, first: int, stop: int, epoch: int) -> range:
        return range(epoch * self.samples + first, epoch * self.samples + stop)

    def _draw_all(self, positions: range) -> tuple[Draw, Integers]:
        """What lies at these positions of the whole job, and the lane each is in."""
        dataset, number = self.dealing.deal(positions)
        holes = [at for at in self.moved if at in positions]
        if holes:
            return self._draw_around(positions, holes)
        return self._draw_dealt(dataset, number)

    def _draw_around(self, positions: range, holes: list[int]) -> tuple[Draw, Integers]:
        """With other positions in the place of some."""
        kept = replace(self, moved={})
        whole, lanes = kept._draw_all(positions)
        parts = [whole]
        back = np.arange(len(positions))
        for number, hole in enumerate(holes):
            at = self.moved[hole]
            other, (lane,) = kept._draw_all(range(at, at + 1))
            parts.append(other)
            back[hole - positions.start] = len(positions) + number
            lanes[hole - positions.start] = lane
        return Draw.join(parts).part(back), lanes

    def _draw_dealt(self, dataset: Integers, number: Integers) -> tuple[Draw, Integers]:
        draws, lanes, places = [], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for which, order in enumerate(self.orders):
            mine = np.flatnonzero(dataset == which)
            for epoch, some, at in _epochs(number[mine], order.samples):
                drawn = order.draw(some, epoch=epoch)
                draws.append(replace(drawn, laps=np.full(len(drawn), epoch, np.int64)))
                lanes.append(lanes_of(order, some, epoch=epoch))
                places.append(mine[at])
        back = np.empty(len(dataset), np.int64)
        back[np.concatenate(places)] = np.arange(len(dataset))
        return Draw.join(draws).rows(back), np.concatenate(lanes)[back]


def _epochs(numbers: Integers, samples: int) -> Iterator[tuple[int, range, slice]]:
    """Numbers that follow each other, by the epochs of a dataset they are in."""
    at = 0
    while at < len(numbers):
        epoch, first = divmod(int(numbers[at]), samples)
        count = min(len(numbers) - at, samples - first)
        yield epoch, range(first, first + count), slice(at, at + count)
        at += count


def _share_out(home: Integers, share: Share) -> tuple[Integers, Integers]:
    """One rank's rows of each global batch, and which of them are at home elsewhere. Every rank gets the rows
    whose home it is, as many as it has room for; what is left goes where room is left, in order."""
    batches = len(home) // share.global_batch
    group = np.repeat(np.arange(batches), share.global_batch) * share.world + home
    by_group = np.argsort(group, kind="stable")
    sizes = np.bincount(group, minlength=batches * share.world)
    turn = np.arange(len(home)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    owner = np.empty(len(home), np.int64)
    owner[by_group] = np.where(turn < share.batch, home[by_group], -1)
    room = np.repeat(np.tile(np.arange(share.world), batches), np.maximum(0, share.batch - sizes))
    owner[owner < 0] = room  # a batch has as much room as it has rows left, so they meet batch by batch
    mine = np.flatnonzero(owner == share.rank)
    return mine, home[mine] != share.rank


def _alone_where(drawn: Draw, strays: Integers) -> Draw:
    """Rows whose chunk another rank reads are chunks by themselves."""
    if not strays.any():
        return drawn
    numbers = Numbers()
    known = np.array([numbers.of(key) for key in drawn.keys], np.int64)
    chunk, dataset = known[drawn.chunk], drawn.dataset
    for row in np.flatnonzero(strays).tolist():
        sample = int(drawn.sample[row])
        chunk[row] = numbers.of((int(dataset[row]), sample, sample + 1))
    return replace(drawn, chunk=chunk, keys=numbers.keys).part(slice(None))


def make_blend(orders: tuple[Order, ...], dealing: Dealing, *, share: Share | None = None) -> Blend:
    """A blend of datasets."""
    if len(orders) != dealing.datasets:
        raise UsageError(
            f"{counted(len(orders), 'dataset')} and {counted(dealing.datasets, 'weight')} make no blend",
            hint="give one weight per dataset",
        )
    empty = [number for number, order in enumerate(orders) if not order.samples]
    if empty:
        raise UsageError(
            f"dataset {empty[0]} of the blend has no samples", hint="leave it out, or use a shorter seq_len"
        )
    orders = tuple(replace(order, dataset=number) for number, order in enumerate(orders))
    return Blend(orders=orders, dealing=dealing, share=share or Share(rank=0, world=1, batch=1))


def dealing_of(weights: tuple[float, ...]) -> Dealing:
    """By weights that stay as they are; they need not sum to one."""
    check_weights(len(weights), weights)
    schedule = Schedule(mixture=Mixture({0: weights}))
    return Dealing(stages=(Stage(begin=0, counts=(0,) * len(weights), schedule=schedule),))


def check_weights(datasets: int, weights: tuple[float, ...]) -> None:
    if not 0 < datasets == len(weights) or not all(0 < weight < math.inf for weight in weights):
        raise UsageError(
            f"{counted(datasets, 'dataset')} and weights {weights} do not make a blend",
            hint="give one positive weight per dataset",
        )
