"""Fetch: one unit, from wherever it is to its place, under a lease, resumed, verified, published.

Everybody who wants a unit calls `bring`. One of them gets the lease and works; the others wait for the
*file*, and watch the lease meanwhile: when its holder dies or falls silent one of them goes on from the
slices that have landed.

Two things keep a paused holder that wakes up from doing harm. Its part folder is gone, so its rename finds
nothing; and what it still writes goes into files that its successor has copied, not taken.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from stoker.errors import BadShardError, ChangedError, LeaseLostError
from stoker.stage.disk.grounds import remove_tree
from stoker.stage.disk.records import record_bytes
from stoker.stage.disk.room import NOW, Room, When
from stoker.stage.disk.shelf import Shelf
from stoker.stage.landing.adopt import adopt_blobs, keep_sound
from stoker.stage.landing.part import Part, is_part_of
from stoker.stage.landing.slices import landing
from stoker.stage.leases.lease import Claim, Lease
from stoker.stage.plan import Unit
from stoker.stage.wire.wire import Landed, Wire
from stoker.storage import named_errors

_LEFT = "left-"  # the owner of such a part has stopped writing
_POLL_S = (0.01, 0.25)  # between looks at a unit that another brings: quick at first
_CHECK_LEASE_S = 1.0


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
        claim = Claim(self.shelf.lease_path(unit.key), ttl_s=self._ttl_s, purpose="fetching")
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

    def stop(self) -> None:
        """Make every `bring` end soon, with Stopped."""
        self.stopping.set()


class _Fetch:
    """One holder's work on one unit."""

    def __init__(
        self,
        fetcher: Fetcher,
        unit: Unit,
        lease: Lease,
        on_bytes: Callable[[int], None],
        when: When,
    ) -> None:
        self._shelf, self._room, self._wire = fetcher.shelf, fetcher.room, fetcher.wire
        self._stop, self._past_cache = fetcher.stopping, fetcher.past_cache
        self._unit, self._lease, self._on_bytes = unit, lease, on_bytes
        self._when = when
        self._checked_at = time.monotonic()

    def run(self) -> None:
        part = self._room.reserve(self._unit, self._open_part, when=self._when)
        try:
            adopt_blobs(part, self._shelf.grounds)
            if self._shelf.record(self._unit.key):
                keep_sound(part, self._shelf.grounds)
            self._fetch_all(part)
            self._publish(part)
        except (ChangedError, BadShardError):
            self._lease.check()
            part.remove()  # what has landed belongs to an object that is no more, or is wrong
            raise
        except OSError as error:
            self._lease.check()  # our folder was taken over: that is what this raises then
            if error.errno == errno.ENOENT and not os.path.lexists(part.folder / "map"):
                # one that held the lease before, and slept, woke up while it was clearing: begin anew
                raise LeaseLostError(f"{part.folder} was taken away", hint="") from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.remove()
            if error.errno == errno.ENOSPC:
                raise self._room.full(self._unit, self._unit.bytes) from error
            raise
        finally:
            part.close()
            self._leave(part)

    def _open_part(self) -> Part:
        """Go on with what others left: take a dead owner's folder as it is, copy from any other."""
        mine = self._shelf.part_path(self._unit.key, self._lease.owner.token)
        others = [path for path in self._shelf.parts_of(self._unit.key) if is_part_of(path, self._unit)]
        heritage = next(filter(self._is_ended, others), None)
        if heritage:
            os.rename(heritage, mine)
        part = Part(mine, self._unit, grounds=self._shelf.grounds)
        for other in self._shelf.parts_of(self._unit.key):
            if other != mine:
                if self._is_ours(other) or self._is_provable:
                    part.copy_from(other)
                remove_tree(other)
        return part

    def _is_ended(self, folder: Path) -> bool:
        """Whether nobody writes there any more. Another user always could."""
        owner = folder.name.rpartition("~")[2]
        previous = self._lease.previous if self._lease.previous_is_dead else None
        is_left = owner.startswith(_LEFT) or (previous is not None and owner == previous.token)
        return is_left and self._is_ours(folder)

    def _is_ours(self, folder: Path) -> bool:
        facts = folder.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid in self._shelf.grounds.mine

    @property
    def _is_provable(self) -> bool:
        """Whether what another user's part says will be checked against the origin's own digest."""
        return not self._unit.is_bundle and bool(self._unit.blocks or self._unit.files[0].digest)

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
                if not self._unit.blocks:  # with them the landing knows which slices are wrong
                    for number in range(len(self._unit.files)):
                        part.forget(number)

    def _fetch_large(self, part: Part) -> None:
        (file,) = self._unit.files
        with landing(part, 0, past_cache=self._past_cache) as sink:
            if missing := part.missing(0):
                self._wire.fetch(file, missing=missing, sink=sink, on_bytes=self._count)

    def _fetch_bundle(self, part: Part) -> None:
        numbers = {file.name: number for number, file in enumerate(self._unit.files)}

        def deliver(landed: Sequence[Landed]) -> None:
            part.put([(numbers[file.name], data) for file, data in landed])

        missing = [file for number, file in enumerate(self._unit.files) if part.missing(number)]
        if missing:
            self._wire.fetch_small(missing, deliver=deliver, on_bytes=self._count)
        part.sync()

    def _publish(self, part: Part) -> None:
        self._lease.check()
        self._shelf.add(self._unit, part.publish(record_bytes(self._unit)))
        part.remove()

    def _count(self, count: int) -> None:
        """Called as bytes arrive: the place to stop, or to notice that another has taken over."""
        self._on_bytes(count)
        if self._stop.is_set():
            raise Stopped
        if time.monotonic() - self._checked_at > _CHECK_LEASE_S:
            self._checked_at = time.monotonic()
            self._lease.check()

    def _leave(self, part: Part) -> None:
        """Nothing writes here any more: say so, that the next one need not copy."""
        with suppress(OSError):
            left = self._shelf.part_path(self._unit.key, _LEFT + self._lease.owner.token)
            os.rename(part.folder, left)
