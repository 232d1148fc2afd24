"""Exit order: which process of the job went first, and how, seen from beside it.

A process is waited for by its parent alone, but a pidfd says to anybody when it ends, and while its parent
has not waited for it /proc still has its exit status. So the rank that was killed is told from those that
were ended because of it, also where the launcher is no Python (mpirun, a shell).
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LOOK_S = 0.25  # how soon a new process is followed
_MOST = 1024  # processes of one machine that are followed: each takes a file descriptor


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """A process that ended: `status` is its exit code, minus a signal's number, None where unseen."""

    pid: int
    t: float  # on the monotonic clock
    status: int | None
    worker: bool  # a child of a trainer, such as a loader's worker


class Exits:
    """Follows the trainers and their children until closed; a thread of its own."""

    def __init__(self, pids: Callable[[], Iterable[int]], on_exit: Callable[[Exit], None]) -> None:
        self._pids, self._on_exit = pids, on_exit
        self._followed: dict[int, tuple[int, bool]] = {}  # pidfd → process, is it a trainer's child
        self._known: set[int] = set()
        self._poll = select.poll()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stoker-exits", daemon=True)
        self.seen: list[Exit] = []

    def __enter__(self) -> Exits:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """See who is gone by now, and stop; safe twice."""
        self._over.set()
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._over.is_set():
            with suppress(OSError):  # the run folder is gone
                self._follow()
            self._collect(wait_s=_LOOK_S)
        self._collect(wait_s=0.0)
        for handle in self._followed:
            os.close(handle)
        self._followed.clear()

    def _follow(self) -> None:
        for trainer in self._pids():
            self._open(trainer, worker=False)
            for child in _children(trainer):
                self._open(child, worker=True)

    def _open(self, pid: int, *, worker: bool) -> None:
        if pid in self._known or len(self._followed) >= _MOST:
            return
        self._known.add(pid)
        with suppress(OSError):  # it has ended, or the kernel is older than 5.3
            handle = os.pidfd_open(pid)
            self._followed[handle] = (pid, worker)
            self._poll.register(handle, select.POLLIN)

    def _collect(self, *, wait_s: float) -> None:
        for handle, _ in self._poll.poll(1000 * wait_s):
            pid, worker = self._followed.pop(handle)
            self._poll.unregister(handle)
            os.close(handle)
            one = Exit(pid=pid, t=time.monotonic(), status=status_of(pid), worker=worker)
            self.seen.append(one)
            self._on_exit(one)


def status_of(pid: int) -> int | None:
    """How a process ended that nobody has waited for yet; None once somebody has."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return os.waitstatus_to_exitcode(int(fields[49])) if len(fields) > 49 and fields[0] in "ZX" else None


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
