"""Several datasets, mixed by weight."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from stoker.errors import UsageError
from stoker.mixing import Integers, key_of, permutation
from stoker.ordering.order import Draw, Numbers, Order, Window, lanes_of

# Places in a blend's pattern: weights are kept to one part in this many.
_PATTERN = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Blend:
    """Every lane deals the datasets out by one repeating pattern, so the shares hold over any stretch, and
    each dataset goes through epochs of its own."""

    orders: tuple[Order, ...]
    weights: tuple[float, ...]
    pattern: Integers  # the dataset at each place
    before: Integers  # [dataset, place]: how often it came before
    share: Integers  # places of each dataset
    seed: int

    @property
    def lanes(self) -> int:
        return self.orders[0].lanes

    @property
    def positions(self) -> int:
        """One epoch of a blend is as many samples as its datasets hold together."""
        total = sum(order.samples for order in self.orders)
        return total - total % self.lanes

    def draw(self, rows: range, *, epoch: int) -> Draw:
        """What lies at these positions of an epoch: a blend goes on where its last epoch ended."""
        gone = epoch * self.positions
        sample, chunk, numbers = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64), Numbers()
        for mine, lane, turns in lanes_of(range(rows.start + gone, rows.stop + gone, rows.step), self.lanes):
            # a dataset's samples follow each other only in all turns: where a rank has every third, say,
            # all are dealt and two of three left out
            every = range(turns.start, turns[-1] + 1)
            dealt = self._deal(lane, every, numbers)
            sample[mine], chunk[mine] = (column[:: turns.step] for column in dealt)
        return Draw(sample=sample, chunk=chunk, keys=numbers.keys).part(slice(None))

    def _deal(self, lane: int, turns: range, numbers: Numbers) -> tuple[Integers, Integers]:
        shift = key_of(self.seed, lane) % _PATTERN
        cycle, place = np.divmod(np.arange(turns.start + shift, turns.stop + shift), _PATTERN)
        dataset = self.pattern[place]
        number = cycle * self.share[dataset] + self.before[dataset, place] - self.before[dataset, shift]
        sample, chunk = np.empty_like(number), np.empty_like(number)
        for which, order in enumerate(self.orders):
            mine = np.flatnonzero(dataset == which)
            if len(mine):
                first = int(number[mine[0]])
                parts = _epochs(order, lane, range(first, first + len(mine)))
                found, where = np.empty_like(mine), np.empty_like(mine)
                numbers.collect(parts, sample=found, chunk=where)
                sample[mine], chunk[mine] = found, where
        return sample, chunk


def _epochs(order: Order, lane: int, numbers: range) -> Iterator[tuple[Window, slice]]:
    """What a lane comes to when it goes on from epoch to epoch."""
    size = order.lane_size(lane)
    while numbers:
        epoch, turn = divmod(numbers.start, size)
        stop = min(size, turn + len(numbers))
        yield from order.walk(lane, range(turn, stop), epoch=epoch)
        numbers = numbers[stop - turn :]


def make_blend(orders: tuple[Order, ...], weights: tuple[float, ...], *, seed: int = 0) -> Blend:
    """A blend of datasets; the weights need not sum to one."""
    _check(orders, weights)
    orders = tuple(replace(order, dataset=number) for number, order in enumerate(orders))
    share = _apportion(weights, _PATTERN)
    pattern = np.repeat(np.arange(len(orders)), share)[permutation(_PATTERN, key_of(seed))]
    chosen = pattern == np.arange(len(orders))[:, None]
    before = np.cumsum(chosen, axis=1) - chosen
    return Blend(orders=orders, weights=weights, pattern=pattern, before=before, share=share, seed=seed)


def check_weights(datasets: int, weights: tuple[float, ...]) -> None:
    if not 0 < datasets == len(weights) or not all(0 < weight < math.inf for weight in weights):
        raise UsageError(
            f"{datasets} datasets and weights {weights} do not make a blend",
            hint="give one positive weight per dataset",
        )


def _check(orders: tuple[Order, ...], weights: tuple[float, ...]) -> None:
    check_weights(len(orders), weights)
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
