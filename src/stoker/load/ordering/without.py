"""An order without some samples: others take their places, and the epoch is so much shorter.

The places of samples that are left out are taken by those that would come last. So every other sample still
comes once, nearly all of them at the step at which they would have come, and an epoch has fewer positions
by as many as were left out. Packed rows stay what they are; the documents are taken out of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from stoker.load.ordering.blend import Blend
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.find import positions_of
from stoker.load.ordering.packing import Packed
from stoker.load.ordering.plan import Cursor, Ordered, Planner, Sorted, Task
from stoker.load.ordering.rounds import Share
from stoker.load.ordering.spans import Elastic

Names = frozenset[tuple[int, int]]  # samples: the layout each is of, and its number there


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """Samples that do not come any more from a cursor on."""

    since: Cursor
    samples: Names

    def begin(self, epoch: int) -> int | None:
        """From which position of an epoch on; None: not in this one."""
        if epoch < self.since.epoch:
            return None
        return self.since.position if epoch == self.since.epoch else 0


def of_layout(left_out: Sequence[LeftOut], number: int | None) -> list[LeftOut]:
    """What is left out of one layout; None: of all of them, which are blended."""
    if number is None:
        return list(left_out)
    return [
        replace(some, samples=frozenset(one for one in some.samples if one[0] == number)) for some in left_out
    ]


class LeavingOut:
    """A planner of an order without some samples."""

    def __init__(
        self,
        order: Elastic | Blend,
        share: Share,
        left_out: Sequence[LeftOut],
        *,
        make: Callable[[Ordered], Planner],
        arranged: Callable[[Ordered], Ordered],
    ) -> None:
        self._order, self._share, self._left_out = order, share, left_out
        self._make, self._arranged = make, arranged
        self._made: tuple[int, Planner] | None = None

    def batches(self, cursor: Cursor) -> int | None:
        return self._planner(cursor.epoch).batches(cursor)

    def epoch(self, cursor: Cursor, *, group: Callable[[], int]) -> Iterator[Task]:
        return self._planner(cursor.epoch).epoch(cursor, group=group)

    def _planner(self, epoch: int) -> Planner:
        if self._made is None or self._made[0] != epoch:
            self._made = epoch, self._make(self._without(epoch))
        return self._made[1]

    def _without(self, epoch: int) -> Ordered:
        order, arranged = self._order, self._arranged(self._order)
        size, moved = closed_up(order, arranged, self._left_out, epoch)
        if size == order.positions and not isinstance(arranged, Elastic):
            return arranged
        if isinstance(order, Blend) and arranged is order:
            begin = epoch * order.samples
            return replace(order, size=size, moved={begin + at: begin + by for at, by in moved.items()})
        return Without(base=arranged, size=size, moved=moved, share=self._share)


def closed_up(
    order: Elastic | Blend, arranged: Ordered, left_out: Sequence[LeftOut], epoch: int
) -> tuple[int, dict[int, int]]:
    """How many positions are left of an epoch, and which of them stand for others."""
    size, moved = order.positions, dict[int, int]()
    for some in left_out:
        if (begin := some.begin(epoch)) is None:
            continue
        where = {at: by for by, at in moved.items()}
        found = [
            at
            for dataset, sample in sorted(some.samples)
            for at in positions_of(order, dataset, sample, epoch=epoch)
        ]
        if isinstance(arranged, Sorted):
            found = [arranged.moved(at, epoch=epoch) for at in found]
        holes = {where.get(at, at) for at in found if at in where or at not in moved}
        holes = {at for at in holes if begin <= at < size}
        size -= len(holes)
        last = [at for at in range(size, size + len(holes)) if at not in holes]
        for hole, at in zip(sorted(at for at in holes if at < size), last, strict=True):
            moved[hole] = moved.get(at, at)
        moved = {at: by for at, by in moved.items() if at < size}
    return size, moved


@dataclass(frozen=True, kw_only=True)
class Without:
    """An order of one dataset in which some positions stand for others."""

    base: Ordered
    size: int
    moved: Mapping[int, int]
    share: Share
    _stand_ins: dict[int, dict[int, int]] = field(default_factory=dict, init=False, compare=False)

    @property
    def positions(self) -> int:
        return self.size

    def draw(self, rows: range, *, epoch: int) -> Draw:
        places = [(rows.index(at), by) for at, by in self.moved.items() if at in rows]
        return self._replaced(self.base.draw(rows, epoch=epoch), places, epoch)

    def deal(self, rows: range, *, epoch: int) -> Draw:
        """From a rank's own lanes as far as all ranks have a row; what is left is taken as it comes."""
        first = rows.start - self.share.rank
        if not self._shares_lanes(first, epoch):
            return self.draw(rows, epoch=epoch)
        shared = min(len(rows), max(0, self.size - first) // self.share.world)
        dealt = self.base.deal(rows[:shared], epoch=epoch)
        if epoch not in self._stand_ins:
            self._stand_ins[epoch] = {self._sample(at, epoch): by for at, by in self.moved.items()}
        by = self._stand_ins[epoch]
        rows_left_out = np.flatnonzero(np.isin(dealt.sample, list(by))).tolist()
        places = [(row, by[int(dealt.sample[row])]) for row in rows_left_out]
        dealt = self._replaced(dealt, places, epoch)
        rest = rows[shared:]
        return Draw.join([dealt, self.draw(rest, epoch=epoch)]) if rest else dealt

    def _shares_lanes(self, first: int, epoch: int) -> bool:
        """Whether ranks can keep to their own lanes. Without gaps a job is cut anew where they cannot."""
        base = self.base
        return isinstance(base, Elastic) and base.begins_round(first, self.share.world, epoch=epoch)

    def _sample(self, at: int, epoch: int) -> int:
        return int(self.base.draw(range(at, at + 1), epoch=epoch).sample[0])

    def _replaced(self, drawn: Draw, places: Sequence[tuple[int, int]], epoch: int) -> Draw:
        """Rows of which others take the place: chunks by themselves, their neighbours are elsewhere."""
        if not places:
            return drawn
        back = np.arange(len(drawn))
        others = [self.base.draw(range(at, at + 1), epoch=epoch).alone() for _, at in places]
        for number, (row, _) in enumerate(places):
            back[row] = len(drawn) + number
        return Draw.join([drawn, *others]).part(back)


def kept_parts(left_out: Sequence[LeftOut]) -> Callable[[Draw, Packed, Cursor], npt.NDArray[np.bool_]]:
    """For packed rows: which parts of a group at a cursor stay."""

    def kept(drawn: Draw, packed: Packed, at: Cursor) -> npt.NDArray[np.bool_]:
        stay = np.ones(len(packed.item), bool)
        named = list(zip(drawn.dataset.tolist(), drawn.sample.tolist(), strict=True))
        for some in left_out:
            begin = some.begin(at.epoch)
            if begin is None or at.position < begin:
                continue
            is_first = (at.epoch, at.position) == (some.since.epoch, some.since.position)
            gone = np.array([one in some.samples for one in named], bool)[packed.item]
            stay &= ~(gone & (packed.row >= (some.since.row if is_first else 0)))
        return stay

    return kept
