"""Who samples a machine: one of its watchers at a time, by a file lock that the kernel gives back.

`srun stoker watch` starts several on a node. The first takes the lock; when it ends, or is killed, the next
one goes on, so that a machine is seen for as long as anybody watches it.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from stoker.errors import StokerError
from stoker.watch.runs.files import PRIVATE
from stoker.watch.sampler import Sampler

_AGAIN_S = 1.0


class Claim:
    """A lock on one file; held until released or the process ends."""

    def __init__(self, path: Path) -> None:
        self._path, self._handle = path, -1

    @property
    def held(self) -> bool:
        return self._handle >= 0

    def take(self) -> bool:
        """Is it ours, or has it just become so? Without locks on its filesystem, whoever makes it has it."""
        if self.held:
            return True
        made = False
        try:
            handle = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, PRIVATE)
            made = True
        except FileExistsError:
            try:
                handle = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # another user's, or gone again
                return False
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        except OSError:
            if not made:
                os.close(handle)
                return False
        self._handle = handle
        return True

    def release(self) -> None:
        """Safe twice. The file stays: one that is removed while another opens it would be locked twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Turns:
    """Samples from the moment the claim is ours until closed."""

    def __init__(self, claim: Claim, sampler: Callable[[], Sampler]) -> None:
        self._claim, self._sampler = claim, sampler
        self._over = threading.Event()
        self._running: Sampler | None = None
        self._waiting: threading.Thread | None = None

    def __enter__(self) -> Turns:
        if self._claim.take():
            self._begin()  # what is wrong with where samples come from is the user's to know
        else:
            self._waiting = threading.Thread(target=self._wait, name="stoker-turn", daemon=True)
            self._waiting.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._waiting is not None:
            self._waiting.join(timeout=5)
        if self._running is not None:
            self._running.close()
        self._claim.release()

    def _wait(self) -> None:
        while not self._over.wait(_AGAIN_S):
            with suppress(OSError):  # the run folder is gone
                if self._claim.take():
                    with suppress(StokerError):  # the exporter is gone: the program goes on
                        self._begin()
                    return

    def _begin(self) -> None:
        self._running = self._sampler()
        self._running.__enter__()
