"""Pins (reference counts): a unit that a living process reads is never evicted.

    CACHE/.stoker/pins/NAME          lines `+KEY` and `-KEY`, written by one process
    CACHE/.stoker/pins/NAME.lease    its lease: as long as it is held, the pins count

A lease rather than a kernel lock, because the folder may be shared between nodes; on one node a dead holder
is known at once, elsewhere after the lease's time.
"""

from __future__ import annotations

import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path

from stoker.errors import StorageError, UsageError
from stoker.stage.disk.grounds import read_book
from stoker.stage.leases.lease import Claim, Lease
from stoker.stage.leases.owner import Owner
from stoker.storage import named_errors

_MOST_BYTES = 256 << 20  # nobody reads more files than that names
_SPARE_BYTES = 64 << 10  # of lines about what was let go of, before all is said anew


class Pins:
    """What this process reads. Any thread; `close` lets go of everything."""

    def __init__(self, folder: Path, *, ttl_s: float, purpose: str) -> None:
        self._folder, self._ttl_s, self._purpose = folder, ttl_s, purpose
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._path = folder
        self._said_bytes = self._most_bytes = 0
        self._closed = False

    def add(self, key: str) -> None:
        """Pin a unit (again): on the disk before this returns, so that no evictor overlooks it."""
        with self._lock:
            if self._closed:  # nobody would ever let go of it
                raise UsageError("the cache is closed", hint="make another")
            self._counts[key] = self._counts.get(key, 0) + 1
            if self._counts[key] > 1:
                return
            try:
                self._say(f"+{key}\n")
            except BaseException:
                del self._counts[key]
                raise

    def drop(self, key: str) -> None:
        """Let go of it (once), unless that has been done with everything else."""
        with self._lock:
            if key not in self._counts:
                return
            self._counts[key] -= 1
            if not self._counts[key]:
                del self._counts[key]
                self._say(f"-{key}\n")

    def close(self) -> None:
        """Let go of everything; safe twice."""
        with self._lock:
            self._closed = True
            self._counts.clear()
            lease, self._lease = self._lease, None
            _withdraw(self._path, lease)

    def _say(self, line: str) -> None:
        if self._lease is None or self._lease.is_over or self._said_bytes > self._most_bytes:
            self._say_all()
        else:
            self._append(line)

    def _say_all(self) -> None:
        """Everything that is pinned, under a new name: the old one is too long, or was taken from us as that
        of a dead process because we were silent, a suspended job perhaps."""
        path = self._folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        lease = _claim(path, ttl_s=self._ttl_s, purpose=self._purpose).try_take()
        old = self._path, self._lease, self._said_bytes
        self._path, self._lease, self._said_bytes = path, lease, 0
        try:
            self._append("".join(f"+{key}\n" for key in self._counts))
        except BaseException:
            _withdraw(path, lease)
            self._path, self._lease, self._said_bytes = old
            raise
        self._most_bytes = 2 * self._said_bytes + _SPARE_BYTES
        if lease:
            lease.on_lost = self._say_again
        _withdraw(*old[:2])

    def _say_again(self) -> None:
        with self._lock, suppress(StorageError):  # else with the next pin
            if self._lease and self._lease.is_over:
                self._say_all()

    def _append(self, lines: str) -> None:
        # closed each time: a network filesystem shows it to others then
        with named_errors("pin files in", self._path), open(self._path, "ab", opener=open_own) as file:
            self._said_bytes += file.write(lines.encode())


class NoPins:
    """In a folder that cannot be written to: nobody can be told, and nothing can be evicted through it."""

    def add(self, key: str) -> None: ...
    def drop(self, key: str) -> None: ...
    def close(self) -> None: ...


class PinView:
    """What living processes read, as seen from here; remembers since when a holder has been silent."""

    def __init__(self, folder: Path, *, ttl_s: float) -> None:
        self._folder, self._ttl_s = folder, ttl_s
        self._claims: dict[str, Claim] = {}
        self.is_sure = True  # no holder was met that may be dead without anybody here knowing

    def holders(self) -> dict[str, tuple[str, ...]]:
        """Who holds each pinned unit. The pins of the dead are removed on the way."""
        found: dict[str, tuple[str, ...]] = {}
        self.is_sure = True
        for name in self._names():
            path = self._folder / name
            claim = self._claims.setdefault(name, _claim(path, ttl_s=self._ttl_s, purpose="clearing pins"))
            try:
                if lease := claim.try_take():
                    with lease, suppress(OSError):  # what another user laid here may stay: it pins nothing
                        path.unlink()
                    del self._claims[name]
                    continue
                owner = claim.holder()
            except StorageError:  # no lease can be there: something else has its name
                continue
            self.is_sure = self.is_sure and owner is not None and _is_near(owner)
            for key in _pinned_in(path):
                found[key] = (*found.get(key, ()), str(owner or f"the owner of {path}"))
        return found

    def _names(self) -> list[str]:
        """Of pins and their leases; not of a lease that somebody is just making, `NAME.lease.TOKEN.new`."""
        names = (name.removesuffix(".lease") for name in os.listdir(self._folder))
        return sorted({name for name in names if ".lease." not in name})


def _is_near(owner: Owner) -> bool:
    """Whether its death would have been seen at once: a process of this boot and these namespaces."""
    me = Owner.this_process(token="", epoch=0, purpose="", ttl_s=0.0)
    near = (me.host, me.boot, me.pid_namespace)
    return all(near) and (owner.host, owner.boot, owner.pid_namespace) == near


def open_own(path: str, flags: int) -> int:
    """Readable to all who may look into the folder, or else they would not see what is pinned."""
    handle = os.open(path, flags | os.O_NOFOLLOW, 0o644)
    os.fchmod(handle, 0o644)
    return handle


def _withdraw(path: Path, lease: Lease | None) -> None:
    if lease:
        path.unlink(missing_ok=True)
        lease.release()


def _claim(path: Path, *, ttl_s: float, purpose: str) -> Claim:
    # not fenced: a reader that was stopped reads on what it has mapped
    return Claim(path.with_name(f"{path.name}.lease"), ttl_s=ttl_s, purpose=purpose, fenced=False)


def _pinned_in(path: Path) -> set[str]:
    pinned: set[str] = set()
    try:
        data, _ = read_book(path, most=_MOST_BYTES)
    except (FileNotFoundError, ValueError):  # or no pins of ours
        return pinned
    for line in data.decode("utf-8", "replace").splitlines():
        (pinned.add if line.startswith("+") else pinned.discard)(line[1:])
    return pinned
