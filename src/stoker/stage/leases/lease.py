"""Leases without locks: they hold on NFS, and can be taken from the dead and the silent (fencing).

    claim = Claim(path)
    while (lease := claim.try_take()) is None:
        ...  # wait a moment, or see whether the work is done meanwhile
    with lease:
        ...
        lease.check()  # before every step that others see

A lease is good while its record exists (see `seat`): a holder that slept through a takeover finds it gone,
and can remove nothing of its successor's. Nobody trusts a clock but its own: an owner is silent once its
record has stood still for the TTL on the observer's clock.

A holder that is seen to run on this host is never overtaken, however silent: a C call may keep Python's lock
for minutes. One that is stopped (SIGSTOP) is, where that does no harm since every step of the work is fenced;
where it is not (`fenced=False`, `first_rank`) whoever lives keeps the lease, and a process of its own beats
for it, so that other nodes know.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from operator import itemgetter
from pathlib import Path

from stoker.errors import LeaseLostError
from stoker.stage.leases import seat
from stoker.stage.leases.owner import Owner
from stoker.stage.leases.pulse import Pulse
from stoker.stage.leases.seat import View
from stoker.storage import named_errors

TTL_S = 10.0
_BEATS_PER_TTL = 4


class Claim:
    """One observer of a lease: takes it if it can be taken, and remembers how long its owner is silent.

    `path` names a folder that comes and goes with the lease; by custom `X.lease` beside the guarded X.
    """

    def __init__(
        self, path: Path, *, ttl_s: float = TTL_S, purpose: str = "", fenced: bool = True, pulse: bool = False
    ) -> None:
        """`fenced`: what a stopped holder does when it wakes up harms nobody. `pulse`: a process of its own
        is to beat for this lease."""
        self.path = path
        self.ttl_s = ttl_s
        self._purpose, self._fenced, self._pulse = purpose, fenced, pulse
        self._seen: View | None = None
        self._looked_at = self._silent_s = 0.0
        self._living = ""  # the token of an owner that was seen to renew

    def try_take(self) -> Lease | None:
        """The lease, if it is free or its owner is proven dead or was silent for the TTL; else None.

        Silence is what this claim has seen itself: ask again and again, a few times per TTL.
        """
        with named_errors("take the lease", self.path), seat.opened(self.path) as folder:
            view = None if folder is None else seat.look(folder)
            if folder is None or view is None or not view.names:
                return self._found()
            if not view.seat:
                return self._found_again(folder, view)
            dead = view.owner is not None and (
                view.owner.is_dead() or (view.owner.is_of_another_boot() and seat.is_on_own_disk(folder))
            )
            can = dead or (self._is_silent(view) and not self._is_at_work(view.owner))
            return self._succeed(folder, view, dead=dead) if can else None

    def holder(self) -> Owner | None:
        """Who holds the lease, as far as that can be read."""
        with named_errors("read the lease", self.path), seat.opened(self.path) as folder:
            view = None if folder is None else seat.look(folder)
            return view.owner if view else None

    def is_vouched(self) -> bool:
        """Whether the holder is known to live: it runs here, or this claim has seen it renew the lease."""
        holder = self.holder()
        return holder is not None and (holder.is_running() or holder.token == self._living)

    def _found(self) -> Lease | None:
        owner = self._me(epoch=1)
        return self._begin(owner) if seat.found(self.path, owner) else None

    def _found_again(self, folder: int, view: View) -> Lease | None:
        """Sweep what a release that was cut short left. No seat can come back into such a folder, but a
        listing may miss one that is being renamed that moment: look twice."""
        if view != self._seen:
            self._seen = view
            return None
        seat.remove(folder, view.names)
        return self._found()

    def _succeed(self, folder: int, view: View, *, dead: bool) -> Lease | None:
        owner = self._me(epoch=view.epoch + 1)
        if seat.take_over(folder, view, owner):
            return self._begin(owner, previous=view.owner, previous_is_dead=dead)
        seat.remove_folder(self.path)  # our record may have kept its releaser from doing so
        return None

    def _begin(self, owner: Owner, *, previous: Owner | None = None, previous_is_dead: bool = False) -> Lease:
        self._seen = None
        try:
            lease = Lease(
                self.path,
                owner=owner,
                previous=previous,
                previous_is_dead=previous_is_dead,
                pulse=self._pulse,
            )
        except BaseException:  # nobody would renew it
            seat.leave(self.path, owner)
            raise
        seat.remove_leftovers(self.path)
        return lease

    def _is_at_work(self, owner: Owner | None) -> bool:
        """Whether a silent owner is known to go on, or to go on when it is let."""
        return owner is not None and owner.is_running() and not (self._fenced and owner.is_stopped())

    def _is_silent(self, view: View) -> bool:
        now, same = time.monotonic(), view == self._seen
        ttl_s = max(self.ttl_s, view.owner.ttl_s if view.owner else 0.0)
        # A long gap says more about us than about the owner: a machine that was suspended must not judge
        # those that slept with it.
        self._silent_s = self._silent_s + min(now - self._looked_at, ttl_s / 2) if same else 0.0
        if not same and self._seen is not None and self._seen.seat == view.seat:
            self._living = view.token
        self._seen, self._looked_at = view, now
        return self._silent_s >= ttl_s

    def _me(self, *, epoch: int) -> Owner:
        token = secrets.token_hex(8)
        return Owner.this_process(token=token, epoch=epoch, purpose=self._purpose, ttl_s=self.ttl_s)


class Lease:
    """A lease held by this process, renewed by a thread until it is released. Any thread may use it.

    A child forked from the holder does not hold it: there `check` raises and `release` does nothing.
    """

    def __init__(
        self,
        path: Path,
        *,
        owner: Owner,
        previous: Owner | None = None,
        previous_is_dead: bool = False,
        pulse: bool = False,
    ) -> None:
        self.path = path
        self.owner = owner
        self.previous = previous
        self.previous_is_dead = previous_is_dead
        self._record = path / seat.record_name(owner.token)
        self._renewed_at = _now()
        self.is_over = False  # released, or found to be lost
        self.on_lost: Callable[[], None] = lambda: None  # called by the thread that found it to be lost
        self._heart = _Heart.of(path)
        self._heart.add(self)
        self._pulse = Pulse(self._record, beat_s=self.beat_s, parent=owner.pid) if pulse else None

    @property
    def epoch(self) -> int:
        """Grows with every takeover."""
        return self.owner.epoch

    @property
    def beat_s(self) -> float:
        return self.owner.ttl_s / _BEATS_PER_TTL

    def check(self) -> None:
        """Raise LeaseLostError unless the lease is still ours. Call it before every visible step."""
        if self.owner.pid != os.getpid():
            raise self._lost("belongs to the process that forked this one")
        if self.is_over or not self._exists():
            raise self._lost("was released or taken over")
        if _now() - self._renewed_at > self.owner.ttl_s and not self.renew():
            raise self._lost(f"could not be renewed for {self.owner.ttl_s:g} s")

    def renew(self) -> bool:
        """Give a sign of life. False if that failed, for now or for ever."""
        try:
            # By name, not through a descriptor kept open: the name is ours alone, and an open file that a
            # successor removes would live on as `.nfs…` and keep the folder from being removed.
            os.utime(self._record, ns=(time.time_ns(),) * 2, follow_symlinks=False)
        except OSError as error:
            self.is_over = self.is_over or error.errno in seat.GONE
            return False
        self._renewed_at = _now()
        return True

    def release(self) -> None:
        """Give the lease back, leaving nothing; safe to call twice, and after it was lost."""
        if self.owner.pid != os.getpid():
            return
        self.is_over = True
        self._heart.remove(self)
        self.end_pulse()
        with named_errors("release the lease", self.path):
            seat.leave(self.path, self.owner)

    def end_pulse(self) -> None:
        if self._pulse:
            self._pulse.close()

    def _exists(self) -> bool:
        """Whether the record is there: opened, because NFS may answer a stat from memory."""
        try:
            handle = os.open(self._record, seat.READ_FLAGS)
            try:
                return os.fstat(handle).st_nlink > 0
            finally:
                os.close(handle)
        except OSError as error:
            if error.errno in seat.GONE:
                return False
            raise self._lost(f"cannot be read: {error.strerror}") from error

    def _lost(self, why: str) -> LeaseLostError:
        return LeaseLostError(
            f"the lease {self.path} of {self.owner} {why}",
            hint="whoever took it over goes on; run the same command again if nobody did",
        )

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Heart:
    """Renews the leases that this process holds on one filesystem, in one thread.

    One per filesystem, because a server that hangs must not make leases elsewhere look abandoned.
    """

    _all: dict[tuple[int, int], _Heart] = {}  # noqa: RUF012 - one per process and filesystem is the point

    @classmethod
    def of(cls, path: Path) -> _Heart:
        # By process, because neither the thread nor a lock's state survives a fork.
        return cls._all.setdefault((os.getpid(), path.parent.stat().st_dev), cls())

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_at: dict[Lease, float] = {}
        self._thread: threading.Thread | None = None

    def add(self, lease: Lease) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._beat, name="stoker-leases", daemon=True)
                thread.start()  # or not, where a container allows no more: then the next lease tries again
                self._thread = thread
            self._due_at[lease] = time.monotonic() + lease.beat_s
            self._changed.notify()

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._due_at.pop(lease, None)
            self._changed.notify()

    def _beat(self) -> None:
        while lease := self._next():
            if not lease.renew() and lease.is_over:
                self.remove(lease)
                lease.end_pulse()
                lease.on_lost()

    def _next(self) -> Lease | None:
        """The lease to renew now, once there is one; None when the last was released."""
        with self._changed:
            while self._due_at:
                lease, due_at = min(self._due_at.items(), key=itemgetter(1))
                now = time.monotonic()
                if due_at <= now:
                    self._due_at[lease] = now + lease.beat_s
                    return lease
                self._changed.wait(due_at - now)
            self._thread = None
            return None


def _now() -> float:
    """The holder's clock: one that goes on while the machine sleeps, as the observers' do elsewhere."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
