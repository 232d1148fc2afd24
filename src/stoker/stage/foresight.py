"""Eviction by next use (Belady's rule): what is needed last gives way first. Pure.

The order in which a node reads its files is computed, not guessed, so the best possible eviction is known: of
what lies here, the unit whose next use is farthest away goes. A unit is brought ahead of its use only in the
place of the very one that would give way when it is needed, once nothing reads that before then: so that
costs no fetch that waiting would not. In the place of any that is needed later, as it was once, it did: up to
1.33 times the least, as threads came.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from itertools import islice

NEVER = float("inf")
_LATE = 256  # 64 reads that are under way at a time, at most, each of a shard of up to four files


class Foresight:
    """When each unit is used next, as the reader goes on. Any thread."""

    def __init__(self, uses: Sequence[str] = (), *, reading: Collection[str] = ()) -> None:
        """`uses` are the keys of units in the order of their use, one for each read of a chunk; the first
        use of those that are being read has begun."""
        self.uses = uses
        self._turns: dict[str, deque[int]] = defaultdict(deque)  # that are still to come
        for turn, key in enumerate(uses):
            self._turns[key].append(turn)
        for key in self._turns.keys() & set(reading):
            self._turns[key].popleft()
        self._now = -1

    def used(self, key: str) -> None:
        """It is being read. Several threads read at a time, so its turn may be a little before or after those
        of others; who reads what is late still needs it."""
        with suppress(IndexError, KeyError):  # more reads than were foreseen
            self._now = max(self._now, self._turns[key].popleft())

    def next_use(self, key: str) -> float:
        """The turn of its next use; NEVER if there is none that we know of."""
        turns = self._turns.get(key)
        with suppress(IndexError):
            while turns and turns[0] < self._now - _LATE:  # nobody will come to that any more
                turns.popleft()
        return next(iter(turns), NEVER) if turns else NEVER

    def distance(self, key: str, *, beyond: float = -NEVER) -> float:
        """How far away the next use is, or the first beyond some distance, as a share of all uses: two
        datasets that are read side by side come to their ends together."""
        count, turns = max(1, len(self.uses)), self._turns.get(key, ())
        self.next_use(key)  # which forgets what is over
        while True:
            with suppress(RuntimeError):  # another thread read on meanwhile
                away = ((turn - self._now) / count for turn in turns)
                return next((one for one in away if one > beyond), NEVER)

    def foresees(self, key: str) -> bool:
        """Whether it is used at all, sooner or later, or has been."""
        return key in self._turns

    def coming(self, most: int) -> list[str]:
        """The units that are needed next, the soonest first."""
        found: dict[str, None] = {}
        for key in islice(self.uses, max(0, self._now), None):
            found.setdefault(key)
            if len(found) == most:
                break
        return list(found)


def fetched_bytes(
    uses: Sequence[str], sizes: Mapping[str, int], *, budget: int, here: Sequence[str] = ()
) -> int:
    """What a node fetches to use units in this order, with room for so many bytes: the least that it can."""
    turns: dict[str, list[int]] = defaultdict(list)
    for turn in range(len(uses) - 1, -1, -1):
        turns[uses[turn]].append(turn)  # the next is last
    held = _Held(sizes, budget, next_use=lambda key: turns[key][-1] if turns[key] else len(uses))
    for key in here:
        held.add(key)
    fetched = 0
    for key in uses:
        turns[key].pop()
        if key not in held.keys:
            fetched += sizes[key]
        held.add(key)
    return fetched


class _Held:
    """Units in a cache of some size; the farthest next use gives way."""

    def __init__(self, sizes: Mapping[str, int], budget: int, next_use: Callable[[str], int]) -> None:
        self.keys: set[str] = set()
        self._sizes, self._left, self._next_use = sizes, budget, next_use
        self._farthest: list[tuple[int, str]] = []  # a heap; an entry whose turn has passed is of no use

    def add(self, key: str) -> None:
        if key not in self.keys:
            self._make_room(self._sizes[key])
            self.keys.add(key)
            self._left -= self._sizes[key]
        heapq.heappush(self._farthest, (-self._next_use(key), key))

    def _make_room(self, size: int) -> None:
        while self._left < size and self.keys:
            turn, key = heapq.heappop(self._farthest)
            if key in self.keys and -turn == self._next_use(key):
                self.keys.remove(key)
                self._left += self._sizes[key]
