"""What comes behind what is waited for: units in their readers' order, of several readers in turn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stoker.stage.plan import Unit
from stoker.stage.through.session import Job, Session

LATER_S = 1.0  # until a unit is looked at again that another process brings

Vouch = Callable[[Unit], Unit]  # adds the digests of its blocks to a unit


@dataclass(frozen=True, kw_only=True, slots=True)
class Opening:
    """A unit that is to be opened, before anything of it can come."""

    unit: Unit
    vouch: Vouch


class Backlog:
    """Not safe for several threads: its owner has a lock."""

    def __init__(self) -> None:
        self._orders: dict[object, dict[str, Unit]] = {}
        self._vouch: dict[object, Vouch] = {}
        self._later: dict[str, float] = {}  # when to look again; never, while somebody opens it

    def follow(self, owner: object, units: Sequence[Unit], vouch: Vouch) -> None:
        """This reader's order is another one now."""
        self._orders[owner] = {unit.key: unit for unit in units}
        self._vouch[owner] = vouch

    def forget(self, owner: object) -> set[str]:
        """This reader is gone: what was to come for it alone."""
        mine = set(self._orders.pop(owner, ()))
        self._vouch.pop(owner, None)
        return mine.difference(*self._orders.values())

    def add(self, unit: Unit) -> None:
        """A unit that was opened because somebody waited for some of it: it is to be completed too."""
        if not any(unit.key in order for order in self._orders.values()):
            self._orders.setdefault(None, {})[unit.key] = unit
            self._vouch.setdefault(None, lambda unit: unit)

    def drop(self, key: str) -> None:
        """It is whole, or cannot be brought."""
        for order in self._orders.values():
            order.pop(key, None)
        self._later.pop(key, None)

    def put_off(self, key: str, now: float) -> None:
        """Another process brings it."""
        self._later[key] = now + LATER_S

    def next(self, sessions: Mapping[str, Session], now: float, *, may_open: bool) -> Job | Opening | None:
        """What comes next: slices of an open unit, or a unit to open."""
        for owner in list(self._orders):
            if found := self._next_of(owner, sessions, now, may_open):
                self._orders[owner] = self._orders.pop(owner)  # the others are next
                return found
        return None

    def _next_of(
        self, owner: object, sessions: Mapping[str, Session], now: float, may_open: bool
    ) -> Job | Opening | None:
        for key, unit in self._orders[owner].items():
            if session := sessions.get(key):
                if job := session.some():
                    return job
            elif may_open and self._later.get(key, now) <= now:
                self._later[key] = float("inf")
                return Opening(unit=unit, vouch=self._vouch[owner])
        return None
