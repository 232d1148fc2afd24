"""Spans: pieces of wall time in a run, said by whoever spends them.

The stages call `span(...)` around their work. It does nothing until `stoker watch` has attached;
then each process writes its spans into its own ring: a mapped file of
fixed-size records in the run folder. A record is in the page cache as soon as it is written, so a process
killed by SIGKILL or SIGBUS loses nothing, and a reader may look while it is being written. The space is
allocated up front: a full disk is an error when the ring is made, never a bus error later.

Only the standard library is used here: the watched program's environment may have nothing else.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

MAGIC = b"stokring"
HEAD = struct.Struct("<8sIIqiI")  # magic, record bytes, capacity, pid, rank, bytes of names
HEAD_BYTES = 64
NAMES_BYTES = 16384 - HEAD_BYTES
RECORD = struct.Struct("<ddqqHHI")  # start, end, step, bytes, what, thread, sequence number from 1
FIRST = HEAD_BYTES + NAMES_BYTES
_SIZE, _pack = RECORD.size, RECORD.pack_into
SPANS = 1 << 19  # 21 MB: some 50,000 steps of ten spans
NO_STEP = -1

# What is said of checkpoints beside the loop's own time, for `stoker history goodput`: a load by whatever
# means, one by a Checkpointer (its step is the one resumed from; NO_STEP: a fresh start), and its folder.
RESTORE, RESTORED, FOLDER = "restore", "restored", "checkpoint folder "


class Ring:
    """The last `capacity` spans of one process in a mapped file; any thread may write."""

    def __init__(self, path: Path, *, capacity: int = SPANS, rank: int = 0) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        size = FIRST + capacity * RECORD.size
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            self._map = mmap.mmap(handle, size)
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(handle)
        self.path, self.rank = path, rank
        self._capacity = capacity
        self._numbers = itertools.count()  # next() is one step of the interpreter: no lock needed
        self._whats: dict[str, int] = {}
        self._naming = threading.Lock()
        self._names_used = 0
        self._put_head()

    def write(self, what: str, start: float, end: float, step: int, bytes: int, thread: int) -> None:
        """One record; its sequence number stands last, so that a half-written one is not taken for whole."""
        number = next(self._numbers)
        name = self._whats.get(what)
        if name is None:
            name = self._name(what)
        place = FIRST + number % self._capacity * _SIZE
        _pack(self._map, place, start, end, step, bytes, name, thread, (number + 1) & 0xFFFFFFFF)

    def close(self) -> None:
        """Safe twice. A write after it raises ValueError."""
        self._map.close()

    def _name(self, what: str) -> int:
        """Names stand in the head, one a line; when there is no room the rest go by the last one."""
        with self._naming:
            if what not in self._whats:
                line = what.encode() + b"\n"
                if self._names_used + len(line) > NAMES_BYTES:
                    return len(self._whats) - 1
                at = HEAD_BYTES + self._names_used
                self._map[at : at + len(line)] = line
                self._names_used += len(line)
                self._whats[what] = len(self._whats)
                self._put_head()
            return self._whats[what]

    def _put_head(self) -> None:
        HEAD.pack_into(
            self._map, 0, MAGIC, RECORD.size, self._capacity, os.getpid(), self.rank, self._names_used
        )


class Threads(dict[int, int]):
    """Small numbers for threads by their identity, given as they are asked for; the first one is 0."""

    def __missing__(self, thread: int) -> int:
        # Two at once may get one number: harmless, the loop has its own.
        number = self[thread] = min(len(self), 0xFFFF)
        return number


class Recorder:
    """Writes this process's spans into a ring and knows its threads by small numbers; 0 made it."""

    def __init__(self, ring: Ring) -> None:
        self.ring = ring
        self.rank = ring.rank
        self.threads = Threads({threading.get_ident(): 0})

    def write(self, what: str, start: float, end: float, step: int, bytes: int) -> None:
        self.ring.write(what, start, end, step, bytes, self.threads[threading.get_ident()])

    def close(self) -> None:
        self.ring.close()


# The one changing variable of this module: None, or where spans go. Every stage may emit from any
# thread, so it can be neither an argument of every function nor a context variable.
_recorder: Recorder | None = None


def emit(what: str, *, start: float, end: float, step: int | None = None, bytes: int = 0) -> None:
    """Say that `what` took from `start` to `end`. Costs one comparison when nothing records."""
    recorder = _recorder
    if recorder is not None:
        recorder.write(what, start, end, NO_STEP if step is None else step, bytes)


def is_recording() -> bool:
    """Whether it is worth finding out what to emit."""
    return _recorder is not None


@contextmanager
def span(what: str, *, step: int | None = None, bytes: int = 0) -> Iterator[None]:
    """Emit the time this block took."""
    if _recorder is None:
        yield
        return
    start = time.monotonic()
    try:
        yield
    finally:
        emit(what, start=start, end=time.monotonic(), step=step, bytes=bytes)


def record_to(recorder: Recorder | None) -> Recorder | None:
    """From now on this process's spans go there (None: nowhere); says where they went before."""
    global _recorder
    before, _recorder = _recorder, recorder
    return before
