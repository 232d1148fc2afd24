"""Eviction and space accounting: a byte budget and the disk's free space, shared by all processes.

Room is given out by one process at a time, under a lease: it counts what lies here and what is on its way,
evicts what is needed last (see `foresight`) or was longest unused if the budget asks for it, and lets the
caller make its part folder, which is the reservation. Without a budget nothing is ever evicted: what one job
staged, another must not lose.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stoker.errors import CacheFullError, StorageError
from stoker.formats.sizes import say_size
from stoker.redact import redact_url
from stoker.stage.disk.pins import PinView
from stoker.stage.disk.shelf import Record, Shelf
from stoker.stage.landing.part import Part
from stoker.stage.leases.lease import Claim, Lease
from stoker.stage.plan import Holding, Unit, evictions, evictions_ahead

_SPARE_BYTES = 16 << 20  # left on the disk for the books, the leases and everybody else
_POLL_S = 0.02
_STILL_S = 2.0  # without anything read or fetched: nobody will make room


@dataclass(frozen=True, kw_only=True, slots=True)
class When:
    """How urgent a unit is, and when each unit is used next, or beyond some distance, as far as whoever asks
    knows."""

    is_now: bool = True
    next_use: Callable[[str, float], float] = lambda key, beyond: math.inf
    foreseen: Callable[[str], bool] = lambda key: False

    def going(self, unit: Unit, holdings: Sequence[Holding], need_bytes: int) -> tuple[str, ...] | None:
        """Which units give way for this one; None if that cannot be."""
        keep = {unit.key}
        if self.is_now:
            return evictions(holdings, need_bytes=need_bytes, keep=keep, next_use=self._next_use)
        return evictions_ahead(
            holdings,
            need_bytes=need_bytes,
            keep=keep,
            next_use=self.next_use,
            at=self._next_use(unit.key),
            foreseen=self.foreseen,
        )

    def _next_use(self, key: str) -> float:
        return self.next_use(key, -math.inf)


NOW = When()


class Room:
    """Gives out the space of a cache folder. Any thread."""

    def __init__(self, shelf: Shelf, *, budget_bytes: int, ttl_s: float) -> None:
        self._shelf, self._budget, self._ttl_s = shelf, budget_bytes, ttl_s
        self._pins = PinView(shelf.pins_folder(), ttl_s=ttl_s)

    @property
    def is_limited(self) -> bool:
        return self._budget > 0

    @property
    def budget_bytes(self) -> int:
        return self._budget

    def reserve(self, unit: Unit, begin: Callable[[], Part], *, when: When = NOW) -> Part:
        """Make room for a unit and begin it. One that is not needed yet takes the place of what is needed
        later still, and nobody waits for it; for one that is needed now others are waited for: as long as
        something is read or fetched, something will give way."""
        if not self._budget:  # whoever is late finds the disk full while writing: no need to queue here
            while (short := self._short_bytes(unit)) > 0:
                if not when.is_now or not self._give_up_parts(unit):
                    raise self.full(unit, short)
            return begin()
        self.check_fits([unit])
        silent_at = time.monotonic() + 2 * self._ttl_s
        moves = _Moves()
        while True:
            with self._alone():
                short = self._short_bytes(unit)
                holdings = self.holdings()
                going = when.going(unit, holdings, short)
                if going is not None and self._evict_all(going):
                    return begin()
                if going is None and when.is_now and self._give_up_parts(unit):
                    continue
                doubtful = going is not None or not self._pins.is_sure
                is_moving = moves.seen(holdings, self._shelf.parts())
            # a holder on another node may be dead: its silence shows only after a while
            may_help = is_moving or (doubtful and time.monotonic() < silent_at)
            if not may_help or not when.is_now:
                raise self.full(unit, short)
            time.sleep(_POLL_S)

    def fits(self, total: int) -> bool:
        """Whether so many bytes can lie here at once."""
        return not self._budget or total <= self._budget

    def holdings(self) -> list[Holding]:
        """What lies here, and who holds it."""
        holders = self._pins.holders()
        return [
            Holding(
                key=record.unit.key,
                bytes=record.unit.bytes,
                used_at=record.used_at,
                holders=holders.get(record.unit.key, self._keeper(record)),
            )
            for record in self._shelf.records()
        ]

    def _keeper(self, record: Record) -> tuple[str, ...]:
        """Who alone can remove a unit, where we cannot: in a shared cache, another user."""
        can = self._shelf.grounds.is_removable(record.owner)
        return () if can else (f"user {record.owner} (whose files only they can remove)",)

    def are_read(self, keys: Sequence[str]) -> bool:
        """Whether a living process holds one of these units."""
        holders = self._pins.holders()
        return any(holders.get(key) for key in keys)

    def full(self, unit: Unit, short: int) -> CacheFullError:
        """Why a unit does not fit, and what holds the space."""
        limit = f"its budget of {say_size(self._budget)}"
        hint = "end what reads there, raise the budget, or choose a folder on a larger disk"
        free = self._free()
        if not self._budget or free < unit.bytes + _SPARE_BYTES:
            limit = f"a disk with {say_size(free)} free, of which {say_size(_SPARE_BYTES)} stay for others"
            hint = "free space there or choose another folder"
        if not self._budget:
            hint += "; with a budget the longest unused files give way"
        return CacheFullError(
            f"{unit.files[0].url} ({say_size(unit.bytes)}) does not fit into {self._shelf.folder}: "
            f"{say_size(short)} too much for {limit}; it holds {self._held(unit)}",
            hint=hint,
        )

    def _held(self, unit: Unit) -> str:
        taken: dict[str, int] = {}
        for held in self.holdings():
            name = f"that {', '.join(held.holders)} reads" if held.holders else "that nobody reads"
            taken[name] = taken.get(name, 0) + held.bytes
        coming = sum(whole for key, (whole, _) in self._shelf.parts().items() if key != unit.key)
        if coming:
            taken["on its way"] = coming
        return "; ".join(f"{say_size(count)} {name}" for name, count in taken.items()) or "nothing yet"

    def sweep(self) -> None:
        """Clear what dead processes left and nobody will come back for."""
        self._pins.holders()
        for key in dict.fromkeys(self._shelf.leftovers()):
            with self._taken(key) as lease:
                if lease:
                    self._shelf.clear(key)

    def check_fits(self, units: Sequence[Unit]) -> None:
        """Refuse at once what the budget could never hold together."""
        total = sum(unit.bytes for unit in units)
        if self._budget and total > self._budget:
            raise CacheFullError(
                f"{units[0].files[0].url}{_and_more(units)}: {say_size(total)}, and the whole budget is "
                f"{say_size(self._budget)}",
                hint="raise the budget, or stage a share: --share node/nodes",
            )

    def check_thrash(self, predicted: int, total: int, *, url: str, most: float) -> None:
        """Say what an epoch fetches of data that does not fit the budget, and refuse what is too much."""
        times = predicted / max(1, total)
        said = (
            f"an epoch of {redact_url(url)} will fetch {say_size(predicted)}, {times:.1f} times its "
            f"{say_size(total)}: the budget is {say_size(self._budget)}"
        )
        if times > most:
            raise CacheFullError(
                said,
                hint="raise the budget, shuffle in blocks (shuffle='blocks'), use more nodes, or allow it: "
                f"stoker.Cache(..., refetch={math.ceil(times)})",
            )
        if predicted > total:
            warnings.warn(said, stacklevel=4)

    def empty(self) -> None:
        """Evict everything that nobody holds."""
        with self._alone():
            self._evict_all([held.key for held in self.holdings() if not held.holders])

    def _short_bytes(self, unit: Unit) -> int:
        """How much must come free: for the budget, or for the disk, whichever is more."""
        parts = self._shelf.parts()
        _, rest = parts.pop(unit.key, (0, unit.bytes))
        others = sum(left for _, left in parts.values())
        short = rest + others + _SPARE_BYTES - self._free()
        if self._budget:
            lying = sum(record.unit.bytes for record in self._shelf.records() if record.unit.key != unit.key)
            coming = sum(whole for whole, _ in parts.values())
            short = max(short, lying + coming + unit.bytes - self._budget)
        return short

    def _give_up_parts(self, unit: Unit) -> bool:
        """Remove what others began to bring and nobody brings now; whether there was any."""
        given_up = False
        for key in set(self._shelf.parts()) - {unit.key}:
            with self._taken(key) as lease:
                given_up = (lease is not None and self._shelf.give_up(key)) or given_up
        return given_up

    @contextmanager
    def _taken(self, key: str) -> Iterator[Lease | None]:
        """The lease of what seems to be left, if it can be had: another user may have laid anything here."""
        lease, claim = None, self._claim(key)
        with suppress(StorageError):
            lease = claim.try_take() or claim.try_take()  # what a release left shows at a second look
        try:
            yield lease
        finally:
            if lease:
                lease.release()

    def _free(self) -> int:
        facts = os.statvfs(self._shelf.folder)
        return facts.f_bavail * facts.f_frsize

    def _evict_all(self, keys: Sequence[str]) -> bool:
        units = {unit.key: unit for unit in self._shelf.units()}
        going = [units.pop(key) for key in keys if key in units]
        staying = list(units.values())
        for unit in going:
            if not self._evict(unit.key, staying):
                staying.append(unit)
        return len(staying) == len(units)

    def _evict(self, key: str, staying: Sequence[Unit]) -> bool:
        """Remove a unit, unless somebody fetches or pins it just now."""
        lease = self._claim(key).try_take()
        if lease is None:
            return False
        with lease:
            if (record := self._shelf.record(key)) is None:
                return True
            try:
                hidden = self._shelf.forget(key)
            except (PermissionError, IsADirectoryError, NotADirectoryError):
                return False  # another user laid something where it would be hidden
            # a reader pins first and looks second: either it finds nothing now, or we see its pin
            if self._pins.holders().get(key):
                with suppress(PermissionError, IsADirectoryError, NotADirectoryError):
                    self._shelf.put_back(key, hidden)
                return False
            self._shelf.remove(record.unit, hidden, staying=staying)
        return True

    def _claim(self, key: str) -> Claim:
        return Claim(self._shelf.lease_path(key), ttl_s=self._ttl_s, purpose="eviction")

    def _alone(self) -> Lease:
        claim = Claim(self._shelf.room_path(), ttl_s=self._ttl_s, purpose="making room")
        while not (lease := claim.try_take()):
            time.sleep(_POLL_S)
        return lease


class _Moves:
    """Whether anything is read or fetched meanwhile: then room will come."""

    def __init__(self) -> None:
        self._before: object = None
        self._at = time.monotonic()

    def seen(self, holdings: Sequence[Holding], parts: dict[str, tuple[int, int]]) -> bool:
        now = {held.key for held in holdings if held.holders}, parts
        if now != self._before:
            self._before, self._at = now, time.monotonic()
        return time.monotonic() - self._at < _STILL_S


def _and_more(units: Sequence[Unit]) -> str:
    more = sum(len(unit.files) for unit in units) - 1
    return f" and {more:,} more" if more else ""
