"""Which rank a loader reads for: what it was told, or what is known when its first batch is asked for."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any

from stoker.errors import UsageError
from stoker.load.past import Past
from stoker.world import TORCH, World, loader_worker, torch_group, unnamed_siblings

_IMPORTED_BY = os.getpid()  # a forked child shares the store's socket with its parent: it may not talk there


class Place:
    """A loader's world. Ranks may be given out after the loader was made: the first batch settles it."""

    def __init__(self, given: World | None) -> None:
        self.given = given
        self._settled = False
        self._whole = given or _so_far()
        self.world = _part(self._whole)

    def look(self) -> bool:
        """See whether more is known by now; True where that is another place than was thought so far."""
        return not self._settled and self._move(self.given or _so_far())

    def settle(self) -> bool:
        """Find out for good; True where that is another place than was thought so far."""
        if self._settled:
            self._check()
            return False
        moved = self._move(self.given or World.here())
        if self._whole.size == 1 and self.given is None:
            _warn_of_siblings()
        self._settled = True
        return moved

    def _move(self, whole: World) -> bool:
        """Inside the workers of another loader every worker reads its own part."""
        before, self._whole, self.world = self.world, whole, _part(whole)
        return self.world != before

    def _check(self) -> None:
        """Ranks that are given out after the first batch come too late: all have read the same until now."""
        group = torch_group()
        if self.given is None and group and group != (self._whole.rank, self._whole.size):
            raise UsageError(
                f"this loader began as rank {self._whole.rank} of {self._whole.size}, and {TORCH} now says "
                f"rank {group[0]} of {group[1]}",
                hint="call init_process_group before the first batch, or pass world=stoker.World(...)",
            )

    def compare(self, order: Mapping[str, Any], past: Past) -> None:
        """Warn if another rank of the job reads the same dataset in another order. Nobody waits for anybody:
        the first to come says how, the others compare."""
        if self.given or loader_worker() or os.getpid() != _IMPORTED_BY or torch_group() is None:
            return
        # datasets of one shape, which only their rows tell apart, may be parts that ranks were given before
        what = f"{[name.partition('#')[0] for name in order['datasets']]} {order['shuffle']}"
        stages = past.dealing.stages if past.dealing else ()
        weights = [stage.schedule.mixture.as_state()["points"] for stage in stages]
        told = {**order, "weights": weights, "cut": past.cut}
        how = ", ".join(f"{name} {value!r}" for name, value in told.items())
        first = ""
        with suppress(RuntimeError, AttributeError, ValueError):  # a store that cannot, or is gone
            first = _first_to_say(what, how, self._whole.rank)
        if first and first != how:
            warnings.warn(
                f"rank {self._whole.rank} of {self._whole.size} reads in another order than another rank of "
                f"this job ({how}; there {first}): samples will be seen twice, and others not at all; "
                "give all ranks the same whole dataset and the same options, or pass world= where they read "
                "for themselves",
                RuntimeWarning,
                stacklevel=2,
            )


def _first_to_say(what: str, how: str, rank: int) -> str:
    distributed: Any = sys.modules[TORCH]
    store = distributed.distributed_c10d._get_default_store()
    key = f"stoker/reads/{sha256(what.encode()).hexdigest()[:16]}"
    number = store.add(f"{key}/of/{rank}", 1)  # the n-th loader of a dataset meets the n-th of other ranks
    said: bytes = store.compare_set(f"{key}/{number}", "", how)
    return said.decode()


def _so_far() -> World:
    try:
        return World.here()
    except UsageError:  # it may yet be told; the first batch asks again
        return World()


def _part(world: World) -> World:
    worker = loader_worker()
    return world.split(*worker) if worker else world


def _warn_of_siblings() -> None:
    if told := unnamed_siblings():
        warnings.warn(
            f"{told} says that several processes train together, and nothing says which one this is: "
            "each will read the whole dataset; call init_process_group before the first batch, or pass "
            "world=stoker.World(rank=..., size=...)",
            RuntimeWarning,
            stacklevel=2,
        )
