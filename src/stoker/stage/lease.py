"""Who works on a thing: leases that need no lock, hold on NFS, and outlive no owner.

A lease is a small folder, `X.lease`, beside the thing it guards:

    seat-7-3f9c…      one empty file whose name says who sits: epoch and token
    3f9c….json        the record of that owner; its mtime is the heartbeat

Each step that decides is one call that the kernel, or the NFS server, answers alone; and what it names is
never named again, so that whoever slept before the call cannot hit a successor:

    found       make a folder `X.lease.TOKEN.new` with record and seat, rename it to `X.lease`, which
                fails while there is one that is not empty
    take over   write a record, rename `seat-7-OLD` to `seat-8-NEW`: one rename wins, the others find no
                `seat-7-OLD`; then remove the old record
    release     remove seat, record and folder, which again fails unless it is empty

A lease is good while its record exists: a holder that slept through a takeover finds it gone. Nobody trusts a
clock but its own: an owner is silent once its record has stood still for the TTL on the observer's clock.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from types import TracebackType

from stoker.errors import LeaseLostError
from stoker.stage.owner import Owner
from stoker.storage import named_errors

TTL_S = 10.0
_BEATS_PER_TTL = 4
_NEW = ".new"

_GONE = (errno.ENOENT, errno.ESTALE)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST)


class Claim:
    """One observer of a lease: takes it if it can be taken, and remembers how long its owner is silent."""

    def __init__(self, path: Path, *, ttl_s: float = TTL_S, purpose: str = "") -> None:
        self.path = path
        self.ttl_s = ttl_s
        self._purpose = purpose
        self._seen: _View | None = None
        self._looked_at = self._silent_s = 0.0

    def try_take(self) -> Lease | None:
        """The lease, if it is free or its owner is proven dead or was silent for the TTL; else None.

        Silence is what this claim has seen itself: ask again and again, a few times per TTL.
        """
        with named_errors("take the lease", self.path), _opened(self.path) as folder:
            view = None if folder is None else _look(folder)
            if folder is None or view is None or not view.names:
                return self._found()
            if not view.seat:
                return self._found_again(folder, view)
            dead = view.owner is not None and view.owner.is_dead()
            return self._succeed(folder, view, dead=dead) if dead or self._is_silent(view) else None

    def holder(self) -> Owner | None:
        """Who holds the lease, as far as that can be read."""
        with named_errors("read the lease", self.path), _opened(self.path) as folder:
            view = None if folder is None else _look(folder)
            return view.owner if view else None

    def _found(self) -> Lease | None:
        """Make the lease where there is none."""
        owner = self._me(epoch=1)
        new = self.path.with_name(f"{self.path.name}.{owner.token}{_NEW}")
        try:
            new.mkdir(parents=True)
            with _opened(new) as folder:
                if folder is None or not _furnish(folder, owner):
                    return None  # swept by a founder who was quicker
            won = _rename_folder(new, self.path, seat=_seat(owner))
        finally:
            shutil.rmtree(new, ignore_errors=True)
        return self._begin(owner) if won else None

    def _found_again(self, folder: int, view: _View) -> Lease | None:
        """Sweep the rest of a release that was cut short. No seat can come back into such a folder, but a
        listing may miss one that is just being renamed: look twice."""
        if view != self._seen:
            self._seen = view
            return None
        _remove(folder, view.names)
        return self._found()

    def _succeed(self, folder: int, view: _View, *, dead: bool) -> Lease | None:
        """Take the seat of an owner that is dead or silent."""
        owner = self._me(epoch=view.epoch + 1)
        mine = (_record(owner.token), _seat(owner))
        try:
            _write(folder, mine[0], owner.to_json())
            won = _rename_seat(folder, view.seat, mine[1])
        except BaseException:
            _remove(folder, mine)
            raise
        if not won:
            _remove(folder, mine)
            _remove_folder(self.path)  # what we wrote may have kept its releaser from doing so
            return None
        # Only when no other record is left does nobody else's check() pass, and the lease is ours alone.
        _remove(folder, {*view.names, _record(view.token)} - {view.seat})
        return self._begin(owner, previous=view.owner, previous_is_dead=dead)

    def _begin(self, owner: Owner, *, previous: Owner | None = None, previous_is_dead: bool = False) -> Lease:
        _remove_leftovers(self.path)
        self._seen = None
        return Lease(self.path, owner=owner, previous=previous, previous_is_dead=previous_is_dead)

    def _is_silent(self, view: _View) -> bool:
        now, same = time.monotonic(), view == self._seen
        ttl_s = max(self.ttl_s, view.owner.ttl_s if view.owner else 0.0)
        # A long gap says more about us than about the owner: a machine that was suspended must not judge
        # those that slept with it.
        self._silent_s = self._silent_s + min(now - self._looked_at, ttl_s / 2) if same else 0.0
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
        self, path: Path, *, owner: Owner, previous: Owner | None = None, previous_is_dead: bool = False
    ) -> None:
        self.path = path
        self.owner = owner
        self.previous = previous
        self.previous_is_dead = previous_is_dead
        self._record = path / _record(owner.token)
        self._renewed_at = _now()
        self._is_over = False
        self._heart = _Heart.of(path)
        self._heart.add(self)

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
        if self._is_over or not self._exists():
            raise self._lost("was released or taken over")
        if _now() - self._renewed_at > self.owner.ttl_s and not self.renew():
            raise self._lost(f"could not be renewed for {self.owner.ttl_s:g} s")

    def renew(self) -> bool:
        """Give a sign of life. False if that failed, for now or for ever."""
        try:
            # By name, not through a descriptor kept open: the name is ours alone, and an open file that a
            # successor removes would live on as `.nfs…` and keep the folder from being removed.
            os.utime(self._record, ns=(time.time_ns(),) * 2)
        except OSError as error:
            self._is_over = self._is_over or error.errno in _GONE
            return False
        self._renewed_at = _now()
        return True

    def release(self) -> None:
        """Give the lease back, leaving nothing; safe to call twice, and after it was lost."""
        if self.owner.pid != os.getpid():
            return
        self._is_over = True
        self._heart.remove(self)
        with _opened(self.path) as folder:
            if folder is not None:
                # The seat first: if we die in between, what is left is known to be free.
                _remove(folder, (_seat(self.owner),))
                _remove(folder, (_record(self.owner.token),))
        _remove_folder(self.path)

    def _exists(self) -> bool:
        """Whether the record is there: opened, because NFS may answer a stat from memory."""
        try:
            handle = os.open(self._record, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise self._lost(f"cannot be read: {error.strerror}") from error
        try:
            return os.fstat(handle).st_nlink > 0
        finally:
            os.close(handle)

    def _lost(self, why: str) -> LeaseLostError:
        return LeaseLostError(
            f"the lease {self.path} of {self.owner} {why}",
            hint="whoever took it over goes on; run the same command again if nobody did",
        )

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
            self._due_at[lease] = time.monotonic() + lease.beat_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="stoker-leases", daemon=True)
                self._thread.start()
            self._changed.notify()

    def remove(self, lease: Lease) -> None:
        with self._changed:
            self._due_at.pop(lease, None)
            self._changed.notify()

    def _beat(self) -> None:
        while lease := self._next():
            lease.renew()

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


@dataclass(frozen=True, kw_only=True, slots=True)
class _View:
    """What a lease's folder shows at one moment; equal views mean that nothing moved."""

    folder: int  # its inode
    names: tuple[str, ...] = field(compare=False)
    seat: str = ""
    owner: Owner | None = None
    beat_ns: int = 0

    @property
    def token(self) -> str:
        return self.seat.rpartition("-")[2]

    @property
    def epoch(self) -> int:
        return _epoch(self.seat)


def _look(folder: int) -> _View | None:
    """What an open lease folder shows; None if it was removed meanwhile."""
    view = _view(folder)
    if view is not None and view.owner is None:
        # An NFS client may remember a listing for half a minute: touching the folder makes it ask again.
        with suppress(OSError):
            os.utime(folder)
        view = _view(folder)
    return view


def _view(folder: int) -> _View | None:
    try:
        names, inode = tuple(os.listdir(folder)), os.fstat(folder).st_ino
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
    seat = max((name for name in names if _epoch(name)), key=_epoch, default="")
    view = _View(folder=inode, names=names, seat=seat)
    record, beat_ns = _read(folder, _record(view.token)) if seat else (b"", 0)
    return _View(folder=inode, names=names, seat=seat, owner=Owner.from_json(record), beat_ns=beat_ns)


def _epoch(name: str) -> int:
    """The epoch in a seat's name; 0 for any other name."""
    kind, _, rest = name.partition("-")
    number = rest.partition("-")[0]
    return int(number) if kind == "seat" and number.isdecimal() else 0


def _seat(owner: Owner) -> str:
    return f"seat-{owner.epoch}-{owner.token}"


def _record(token: str) -> str:
    return f"{token}.json"


def _now() -> float:
    """The holder's clock: one that goes on while the machine sleeps, as the observers' does elsewhere."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@contextmanager
def _opened(path: Path) -> Iterator[int | None]:
    """A folder to work in by descriptor: if it is removed and made again, we do not follow its name."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def _read(folder: int, name: str) -> tuple[bytes, int]:
    """A record and when it was last renewed, as the server has it now: open() asks, stat() may not."""
    try:
        handle = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return b"", 0
    try:
        return os.read(handle, 1 << 16), os.fstat(handle).st_mtime_ns
    finally:
        os.close(handle)


def _write(folder: int, name: str, content: bytes) -> None:
    """A new file, readable to all who share the folder: closed, so that NFS shows it to others."""
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        os.write(handle, content)
    finally:
        os.close(handle)


def _furnish(folder: int, owner: Owner) -> bool:
    """Put record and seat into a folder of our own; False if somebody swept it meanwhile."""
    try:
        _write(folder, _record(owner.token), owner.to_json())
        _write(folder, _seat(owner), b"")
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return False
    return True


def _rename_folder(new: Path, path: Path, *, seat: str) -> bool:
    try:
        new.rename(path)
    except OSError as error:
        if error.errno not in (*_GONE, *_TAKEN):
            raise
        return error.errno in _GONE and (path / seat).exists()  # done, but the answer was lost
    return True


def _rename_seat(folder: int, old: str, new: str) -> bool:
    try:
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        return new in _names(folder)  # done, but the answer was lost
    return True


def _names(folder: int) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _remove(folder: int, names: Iterable[str]) -> None:
    for name in names:
        # An NFS client keeps a removed file that somebody here has open as `.nfs…`, and removes it itself.
        if not name.startswith(".nfs"):
            try:
                os.unlink(name, dir_fd=folder)
            except OSError as error:
                if error.errno not in _GONE:
                    raise


def _remove_folder(path: Path) -> None:
    """Remove it if it is empty; if it is not, it is in use."""
    with suppress(OSError):
        path.rmdir()


def _remove_leftovers(path: Path) -> None:
    """Folders in which founders of this lease, or dead ones of its neighbours, meant to start.

    Whoever still works in one has lost, or finds it gone and tries again.
    """
    for new in path.parent.glob(f"*{_NEW}"):
        if new.name.startswith(f"{path.name}.") or _is_abandoned(new):
            shutil.rmtree(new, ignore_errors=True)


def _is_abandoned(new: Path) -> bool:
    with _opened(new) as folder:
        view = None if folder is None else _view(folder)
    return view is not None and view.owner is not None and view.owner.is_dead()
