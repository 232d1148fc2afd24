"""How samples are cut into lanes, and for whom."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

# Divisible by the world sizes people use on one and two machines; more lanes mix better and hold more
# memory (one chunk each).
LANES = 24

_LEAST_OF_A_RANK = 3  # lanes


@dataclass(frozen=True, kw_only=True, slots=True)
class Recut:
    """From a position of an epoch on, what is left of it is in other lanes. Later epochs are cut as for a job
    that begins with these ranks."""

    epoch: int
    position: int
    lanes: int
    ranks: int
    nodes: int

    @property
    def cut(self) -> Cut:
        return Cut(lanes=self.lanes, ranks=self.ranks, nodes=self.nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """How samples are cut into lanes, for the ranks and nodes a job first ran on, and where it was cut anew
    `then`, for other worlds. It belongs to the order: a job that goes on elsewhere keeps it."""

    lanes: int = LANES
    ranks: int = 1
    nodes: int = 1
    then: tuple[Recut, ...] = ()

    def node_of(self, lane: int) -> int:
        """Whose ranks read a lane; 0 where nodes have different numbers of ranks."""
        each, left = divmod(self.ranks, self.nodes)
        return 0 if left or self.lanes % self.ranks else lane % self.ranks // each

    @property
    def radices(self) -> tuple[int, ...]:
        """Of the nested draws: those of the ranks first."""
        shared = math.gcd(self.lanes, self.ranks)
        return *_factors(shared), *_factors(self.lanes // shared)

    def fits(self, world: int) -> bool:
        """Whether so many ranks can each keep to lanes of their own."""
        return world in {math.prod(self.radices[:count]) for count in range(len(self.radices) + 1)}

    def cuts_of(self, epoch: int) -> list[Recut]:
        """How an epoch is cut: from its beginning, and from where it was cut anew."""
        before = [recut for recut in self.then if recut.epoch < epoch]
        whole = Cut.for_world(before[-1].ranks, before[-1].nodes) if before else self
        first = Recut(epoch=epoch, position=0, lanes=whole.lanes, ranks=whole.ranks, nodes=whole.nodes)
        return [first, *(recut for recut in self.then if recut.epoch == epoch)]

    @property
    def latest(self) -> Cut:
        """As all later epochs are cut."""
        return Cut.for_world(self.then[-1].ranks, self.then[-1].nodes) if self.then else self

    def resumed(self, world: int, nodes: int, *, epoch: int, position: int) -> Cut:
        """For a job that goes on from a position: as it is if that suits its ranks, or cut anew."""
        latest = self.cuts_of(epoch)[-1]
        if latest.cut.fits(world) and (position - latest.position) % world == 0:
            return self
        here = [recut for recut in self.then if recut.epoch == epoch and recut.position < position]
        before = [recut for recut in self.then if recut.epoch < epoch]
        kept = [*before[-1:], *here]  # of epochs that are over, the last says how this one was first cut
        # what is left may be little: no more lanes than mix well, since each begins in the middle of a chunk
        lanes = world * max(_LEAST_OF_A_RANK, LANES // world)
        recut = Recut(epoch=epoch, position=position, lanes=lanes, ranks=world, nodes=nodes)
        return replace(self, then=(*kept, recut))

    def later(self, world: int, nodes: int, *, epoch: int) -> Cut:
        """For a job whose epoch has to stay as it is: cut anew from the next one on."""
        kept = [recut for recut in self.then if recut.epoch <= epoch]
        latest = replace(self, then=tuple(kept)).cuts_of(epoch + 1)[-1]
        if latest.cut.fits(world):
            return replace(self, then=tuple(kept))
        whole = Cut.for_world(world, nodes)
        recut = Recut(epoch=epoch + 1, position=0, lanes=whole.lanes, ranks=world, nodes=nodes)
        return replace(self, then=(*kept, recut))

    def as_state(self) -> dict[str, Any]:
        """What a saved position keeps of it, for JSON."""
        return {**asdict(self), "then": [asdict(recut) for recut in self.then]}

    @classmethod
    def for_world(cls, ranks: int, nodes: int, *, lanes: int = 0) -> Cut:
        """Lanes such that every rank has some of its own, and other world sizes still divide them."""
        return cls(lanes=lanes or math.lcm(LANES, ranks), ranks=ranks, nodes=nodes)


@lru_cache(256)
def _factors(number: int) -> Sequence[int]:
    """Prime factors, ascending."""
    found, factor = [], 2
    while number > 1:
        while number % factor:
            factor += 1
        found.append(factor)
        number //= factor
    return tuple(found)
