"""Read-through: what a batch needs first comes first, whichever process of the node brings it.

A reader says which slices of a file it needs (`reach`) and gets the path of the part they lie in. Where this
process holds the unit's lease, its threads bring them before anything else; where another does, a want (see
`disk.wants`) makes that one do so, and its part is read as it fills. What nobody waits for follows behind, in
the order that was told (`follow`): not before the first batch is made, and never in the place of what is
waited for.

One lease holder brings each slice, so that a node fetches every byte once. When a holder dies, whoever waits
takes its part over and goes on from the slices that have landed.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from stoker.errors import LeaseLostError, StokerError
from stoker.stage.disk.room import NOW, When
from stoker.stage.disk.wants import Want, clear_wants, wanted
from stoker.stage.fetch import Fetcher, Stopped
from stoker.stage.landing.maps import has_landed
from stoker.stage.leases.lease import Claim
from stoker.stage.plan import Unit
from stoker.stage.tenure import Tenure
from stoker.stage.through.backlog import Backlog, Opening, Vouch
from stoker.stage.through.crew import Crew, Work
from stoker.stage.through.session import Job, Session
from stoker.stage.wire.wire import Wire
from stoker.storage import named_errors

_URGENT = 24  # slices that are waited for, on their way at once: a chunk for every lane of a loader
BEHIND = 2  # pieces of what is not: more of them would share a slow link with what is waited for
AHEAD = 8  # while nobody waits: each pays for a first byte, of which a fast store far away is made
_MOST_OPEN = 256  # units; each is an open file and a lease
_POLL_S = (0.005, 0.05)  # between looks at a unit that another brings
_LOOK_S = 0.02  # between looks at what others want
_QUIET_S = 1.0  # without a read: nobody is about to need all of the network
_AT_LEAST_S = 5.0  # after the first read the rest comes too, also where nobody says that a batch is there


GivesUp = Callable[[], bool]


class ReadThrough:
    """The units that this process reads while they land. Any thread."""

    def __init__(self, fetcher: Fetcher, *, urgent: Wire) -> None:
        """`urgent` is a wire of its own: what is waited for does not queue behind what is not."""
        self._fetcher, self._shelf, self._urgent = fetcher, fetcher.shelf, urgent
        self._sessions: dict[str, Session] = {}
        self._claims: dict[str, Claim] = {}  # on what others hold: their silence shows to one who looks again
        self._opening: set[str] = set()
        self._backlog = Backlog()
        self._changed = changed = threading.Condition()
        self._first = Crew("stoker-urgent", self._take_urgent, most=_URGENT, changed=changed)
        self._rest = Crew(
            "stoker-prefetch", self._take_rest, most=AHEAD, changed=changed, look_s=_QUIET_S / 2
        )
        self._behind = 0  # pieces that nobody waits for, on their way
        self._watch = Crew("stoker-wants", self._take_look, most=1, changed=changed)
        self._waiting = 0  # readers
        self._began_at = self._read_at = math.inf
        self._closed = False

    def reach(self, unit: Unit, number: int, slices: range, gives_up: GivesUp) -> Path | None:
        """Return when these slices of a file of the unit have landed: where the file is landing; None when
        the unit lies here whole. The path holds for a moment: what becomes whole is moved to its name.
        Stopped, soon after the reader `gives_up` and calls `wake`."""
        want: Want | None = None
        pause_s = _POLL_S[0]
        with self._asking(), named_errors("write to", self._shelf.folder):
            try:
                while True:
                    if session := self._session(unit):
                        if self._landed(session, slices, gives_up):
                            return session.part.folder / str(number)
                    elif self._shelf.holds(unit):
                        return None
                    elif folder := self._landed_elsewhere(unit, number, slices):
                        return folder / str(number)
                    else:
                        want = want or Want(self._shelf, unit.key, slices)
                        if self._fetcher.stopping.wait(pause_s) or gives_up():
                            raise Stopped
                        pause_s = min(2 * pause_s, _POLL_S[1])
            finally:
                if want:
                    want.close()

    def follow(self, owner: object, units: Sequence[Unit], vouch: Vouch) -> None:
        """What is to come behind what is waited for, in this order; `vouch` adds the digests to a unit."""
        with self._changed:
            self._backlog.follow(owner, units, vouch)
            self._read_at = time.monotonic()
            self._rest.call()

    def forget(self, owner: object) -> None:
        """A reader is gone: what is being brought for it alone is left to others."""
        with self._changed:
            keys = self._backlog.forget(owner) & self._sessions.keys()
            mine = [self._sessions[key] for key in keys if not self._sessions[key].is_ending]
            idle = [session for session in mine if not session.active]
            for session in mine:
                session.error = session.error or Stopped()  # others of it end with their jobs
                session.is_ending = not session.active
        for session in idle:
            self._end(session)

    def is_open(self, key: str) -> bool:
        """Whether we bring this unit."""
        return key in self._sessions

    def go(self) -> None:
        """The first batch is there: what is not waited for may come beside what is."""
        with self._changed:
            self._began_at = -math.inf
            self._rest.call()

    def wake(self) -> None:
        """A reader gives up: let it see that."""
        with self._changed:
            self._changed.notify_all()

    def stop(self) -> None:
        """Make everything end soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads and leave what is not whole to others; the wires have been told to stop."""
        self.stop()
        for crew in (self._first, self._rest, self._watch):
            crew.close()
        with self._changed:
            mine = [session for session in self._sessions.values() if not session.is_ending]
            for session in mine:
                session.is_ending = True
        for session in mine:
            self._end(session)
        with self._changed:  # a reader may just be opening or ending one: its lease must not outlive us
            while self._opening or self._sessions:
                self._changed.wait()

    # --- those who wait -------------------------------------------------------------------------------

    @contextmanager
    def _asking(self) -> Iterator[None]:
        with self._changed:
            self._waiting += 1
            if self._began_at == math.inf:
                self._began_at = time.monotonic() + _AT_LEAST_S
        try:
            yield
        finally:
            with self._changed:
                self._waiting -= 1
                self._read_at = time.monotonic()
                if not self._waiting:
                    self._rest.call()

    def _landed(self, session: Session, slices: range, gives_up: GivesUp) -> bool:
        """Wait for slices of a unit that we bring; False if that ended otherwise: look again."""
        with self._changed:
            if session.want(slices):
                self._first.call()
            while not session.has(slices) or session.is_over:
                if self._closed or gives_up():
                    raise Stopped
                if session.is_over:
                    if session.error is None or isinstance(session.error, (LeaseLostError, Stopped)):
                        return False  # whole, or left to others
                    raise session.error
                self._changed.wait()
        return True

    def _landed_elsewhere(self, unit: Unit, number: int, slices: range) -> Path | None:
        for folder in self._shelf.parts_of(unit.key):
            with suppress(OSError):
                is_trusted = folder.lstat().st_uid in self._shelf.grounds.trusted
                if is_trusted and has_landed(folder, unit, number, slices):
                    return folder
        return None

    # --- sessions -------------------------------------------------------------------------------------

    def _session(self, unit: Unit, when: When = NOW) -> Session | None:
        """Ours, opened if need be; None if another process holds the unit, or it is whole."""
        with self._changed:
            while unit.key in self._opening or self._is_ending(unit.key):
                self._changed.wait()
            if self._closed:
                raise Stopped
            if session := self._sessions.get(unit.key):
                return session
            self._opening.add(unit.key)
        try:
            self._close_oldest()
            return self._open(unit, when)
        finally:
            with self._changed:
                self._opening.discard(unit.key)
                self._changed.notify_all()

    def _is_ending(self, key: str) -> bool:
        session = self._sessions.get(key)
        return session is not None and session.is_ending and not self._closed

    def _open(self, unit: Unit, when: When) -> Session | None:
        claim = self._claims.setdefault(unit.key, self._fetcher.claim(unit))
        lease = claim.try_take()
        if lease is None:
            return None
        self._claims.pop(unit.key, None)
        try:
            tenure = Tenure(self._shelf, self._fetcher.room, unit, lease)
            part = None if self._shelf.holds(unit) else tenure.begin(when)
        except BaseException:
            lease.release()
            raise
        if part is None:
            lease.release()
            return None
        session = Session(unit, tenure, part, stopping=self._fetcher.stopping)
        with self._changed:
            self._sessions[unit.key] = session
            self._backlog.add(unit)
            session.is_ending = is_over = session.is_done or self._closed
            self._rest.call()
            self._watch.call()
        if is_over:
            self._end(session)
        return session

    def _close_oldest(self) -> None:
        """Leave a unit to others that nobody has waited for longest, where too many are open."""
        with self._changed:
            open_ones = self._sessions.values() if len(self._sessions) >= _MOST_OPEN else ()
            idle = [one for one in open_ones if not (one.active or one.is_wanted or one.is_ending)]
            oldest = min(idle, key=lambda session: session.used_at, default=None)
            if oldest is None:
                return
            oldest.is_ending = True
        self._end(oldest)

    def _end(self, session: Session) -> None:
        """Publish or leave a unit, and say so to whoever waits for it."""
        session.is_ending, key = True, session.unit.key
        try:
            if session.end():
                clear_wants(self._shelf, key)
        except BaseException as error:  # told to whoever waits for it
            session.error = error
        finally:
            with self._changed:
                session.is_over = True
                self._sessions.pop(key, None)
                if session.is_whole or session.error is not None:
                    self._backlog.drop(key)  # whoever needs what could not come will meet the reason
                self._changed.notify_all()

    # --- what the threads do --------------------------------------------------------------------------

    def _take_urgent(self) -> Work | None:
        for session in self._sessions.values():
            if session.is_wanted and (job := session.urgent()):
                return partial(self._carry_out, job, self._urgent)
        return None

    def _take_rest(self) -> Work | None:
        now = time.monotonic()
        is_quiet = not self._waiting and now - self._read_at > _QUIET_S
        if not is_quiet and now < self._began_at:
            return None
        if self._behind >= (BEHIND if self._waiting else AHEAD):
            return None
        may_open = len(self._sessions) < _MOST_OPEN // 2
        found = self._backlog.next(self._sessions, now, may_open=may_open)
        if isinstance(found, Opening):
            return partial(self._open_rest, found)
        if found is None:
            return None
        self._behind += 1
        return partial(self._carry_out_behind, found)

    def _take_look(self) -> Work | None:
        return self._look if self._sessions else None

    def _carry_out(self, job: Job, wire: Wire) -> None:
        session, error = job.session, None
        try:
            session.fetch(job, wire)
        except BaseException as raised:  # told to whoever waits for it
            error = raised
        with self._changed:
            session.done(job, error)
            session.is_ending = is_done = session.is_done
            self._changed.notify_all()
        if is_done:
            self._end(session)

    def _carry_out_behind(self, job: Job) -> None:
        try:
            self._carry_out(job, self._fetcher.wire)
        finally:
            with self._changed:
                self._behind -= 1

    def _open_rest(self, opening: Opening) -> None:
        key = opening.unit.key
        try:
            is_ours = self._session(opening.vouch(opening.unit), When(is_now=False)) is not None
            is_whole = not is_ours and self._shelf.holds(opening.unit)
        except (StokerError, OSError, Stopped):  # no room, say: whoever needs it will meet the reason
            is_ours, is_whole = False, True
        with self._changed:
            if is_whole:
                self._backlog.drop(key)
            else:
                self._backlog.put_off(key, time.monotonic())  # or it is open, and not looked at for this

    def _look(self) -> None:
        """What other processes wait for, of units that we bring."""
        found = wanted(self._shelf, self._sessions.keys())
        with self._changed:
            for key, ranges in found.items():
                session = self._sessions.get(key)
                if session and session.want([one for some in ranges for one in some]):
                    self._first.call()
        self._fetcher.stopping.wait(_LOOK_S)
