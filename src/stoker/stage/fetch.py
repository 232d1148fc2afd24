"""Fetch: one unit, from wherever it is to its place, under a lease, resumed, verified, published.

Everybody who wants a unit calls `bring`. One of them gets the lease and works; the others wait for the
*file*, and watch the lease meanwhile: when its holder dies or falls silent one of them goes on from the
slices that have landed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from stoker.errors import BadShardError, LeaseLostError
from stoker.stage.disk.room import NOW, Room, When
from stoker.stage.disk.shelf import Shelf
from stoker.stage.landing.part import Part
from stoker.stage.landing.slices import landing
from stoker.stage.leases.lease import Claim, Lease
from stoker.stage.plan import Unit
from stoker.stage.tenure import Tenure
from stoker.stage.wire.wire import Landed, Wire
from stoker.storage import named_errors

_POLL_S = (0.01, 0.25)  # between looks at a unit that another brings: quick at first


class Stopped(Exception):
    """The cache is being closed: what has landed stays for the next one."""


class Fetcher:
    """Brings units. Any thread; several at once share the wire."""

    def __init__(
        self, shelf: Shelf, room: Room, wire: Wire, *, ttl_s: float, past_cache: bool = False
    ) -> None:
        self.shelf, self.room, self.wire, self._ttl_s = shelf, room, wire, ttl_s
        self.past_cache = past_cache
        self.stopping = threading.Event()

    def bring(
        self,
        unit: Unit,
        *,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_wait: Callable[[str], None] = lambda holder: None,
        when: When = NOW,
        anew: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when the unit lies in its place, whoever brought it. `anew`, asked under the lease,
        says whether what lies there is to be replaced."""
        claim = self.claim(unit)
        pause_s = _POLL_S[0]
        while anew() or not self.shelf.holds(unit):
            if self.stopping.is_set():
                raise Stopped
            lease = claim.try_take()
            if lease is None:
                on_wait(str(claim.holder() or "another process"))
                self.stopping.wait(pause_s)
                pause_s = min(2 * pause_s, _POLL_S[1])
                continue
            with suppress(LeaseLostError), lease:  # lost: another goes on, and we wait for its file
                if anew() or not self.shelf.holds(unit):
                    with named_errors("write to", self.shelf.folder):
                        _Fetch(self, unit, lease, on_bytes, when).run()
                return

    def claim(self, unit: Unit) -> Claim:
        return Claim(self.shelf.lease_path(unit.key), ttl_s=self._ttl_s, purpose="fetching")

    def stop(self) -> None:
        """Make every `bring` end soon, with Stopped."""
        self.stopping.set()


class _Fetch:
    """One holder's work on one unit, from the first missing byte to the last."""

    def __init__(
        self,
        fetcher: Fetcher,
        unit: Unit,
        lease: Lease,
        on_bytes: Callable[[int], None],
        when: When,
    ) -> None:
        self._tenure = Tenure(fetcher.shelf, fetcher.room, unit, lease)
        self._wire, self._stop, self._past_cache = fetcher.wire, fetcher.stopping, fetcher.past_cache
        self._unit, self._on_bytes, self._when = unit, on_bytes, when

    def run(self) -> None:
        part = self._tenure.begin(self._when)
        with self._tenure.working(part):
            self._fetch_all(part)
            self._tenure.publish(part)

    def _fetch_all(self, part: Part) -> None:
        for attempt in (1, 2):
            try:
                if self._unit.is_bundle:
                    self._fetch_bundle(part)
                else:
                    self._fetch_large(part)
                return
            except BadShardError:  # damaged on the way: once more
                if attempt == 2:
                    raise
                if (
                    self._unit.is_bundle or not self._unit.blocks
                ):  # with them the landing knows which slices are wrong
                    for number in range(len(self._unit.files)):
                        part.forget(number)

    def _fetch_large(self, part: Part) -> None:
        self._fetch_rest(part, 0, past_cache=self._past_cache)

    def _fetch_rest(self, part: Part, number: int, *, past_cache: bool = False) -> None:
        with landing(part, number, past_cache=past_cache) as sink:
            if missing := part.missing(number):
                file = self._unit.files[number]
                self._wire.fetch(file, missing=missing, sink=sink, on_bytes=self._count)

    def _fetch_bundle(self, part: Part) -> None:
        numbers = {file.name: number for number, file in enumerate(self._unit.files)}

        def deliver(landed: Sequence[Landed]) -> None:
            part.put([(numbers[file.name], data) for file, data in landed])

        for number in part.partly_landed():  # somebody read from them before they were whole
            self._fetch_rest(part, number)
        missing = [file for number, file in enumerate(self._unit.files) if part.missing(number)]
        if missing:
            self._wire.fetch_small(missing, deliver=deliver, on_bytes=self._count)
        part.sync()

    def _count(self, count: int) -> None:
        """Called as bytes arrive: the place to stop, or to notice that another has taken over."""
        self._on_bytes(count)
        if self._stop.is_set():
            raise Stopped
        self._tenure.check()
