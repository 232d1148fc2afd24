"""Parallel writes: a part to its file, space reserved first, chunks hashed and written by threads, synced.

The file is written past the page cache (O_DIRECT) where the filesystem can: gigabytes of checkpoint would
push the training data out of it, and flushing them later costs more than writing them at once.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

import xxhash

from stoker.checkpoint.saved.threads import in_threads
from stoker.errors import StorageError
from stoker.storage import named_errors

_PAGE = 4096
_UNSUPPORTED = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
# Beside a loop that takes all cores six keep the disk busy: durable in 1.47 s, with two 1.72 (small machine).
_THREADS = 6


class Source(Protocol):
    """The bytes of a part. Threads of the writer call `chunk`, then `release`, once for every chunk."""

    @property
    def bytes(self) -> int: ...

    def chunk(self, start: int, stop: int) -> memoryview:
        """These bytes, once they are there; page-aligned, with room up to a whole page behind them."""
        ...

    def release(self, start: int, stop: int) -> None:
        """They are written: their memory may be used again."""
        ...


class Pace:
    """At most so many bytes a second, over all threads that share it; 0 is no limit. `moved` is called for
    every piece that goes."""

    def __init__(self, bytes_per_s: float = 0.0, *, moved: Callable[[], None] | None = None) -> None:
        self._rate, self._moved = bytes_per_s, moved
        self._free_at = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Wait until `count` more bytes may go: for as long as they take at this rate, so that a few large
        pieces keep to it too."""
        if self._moved:
            self._moved()
        if self._rate <= 0:
            return
        with self._lock:
            self._free_at = free_at = max(self._free_at, time.monotonic()) + count / self._rate
        wait = free_at - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def write_part(
    path: Path, source: Source, *, chunk_bytes: int, threads: int = 0, pace: Pace | None = None
) -> tuple[int, ...]:
    """Write a new file from a source and sync it; gives the xxh3 of each chunk."""
    starts = range(0, source.bytes, chunk_bytes)
    with named_errors("write", path), _reserved(path, source.bytes) as files:
        work = _Work(source, files, chunk_bytes=chunk_bytes, pace=pace or Pace())
        digests = tuple(in_threads(work.write, starts, threads=threads or _THREADS, name="stoker-write"))
        os.ftruncate(files.plain, source.bytes)
        os.fsync(files.plain)
    return digests


class _Files:
    """One file opened twice: past the page cache where that works, and plainly."""

    def __init__(self, path: Path) -> None:
        self.plain = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        self.direct = -1
        with suppress(OSError):
            self.direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)

    def close(self) -> None:
        for handle in (self.plain, self.direct):
            if handle >= 0:
                os.close(handle)


@contextmanager
def _reserved(path: Path, size: int) -> Iterator[_Files]:
    """The new file with its space reserved, so that a full disk is known before the first byte."""
    files = _Files(path)
    try:
        if size:
            _reserve(files.plain, -(-size // _PAGE) * _PAGE, path)
        yield files
    finally:
        files.close()


def _reserve(handle: int, size: int, path: Path) -> None:
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
        room = os.fstatvfs(handle)  # a filesystem that cannot reserve can at least say what is free
        if room.f_bavail * room.f_frsize < size:
            raise StorageError(
                f"cannot write {path}: {size:,} bytes are needed and {room.f_bavail * room.f_frsize:,} free",
                hint="free space there, keep fewer checkpoints, or choose another folder",
            ) from None


class _Work:
    """Hashes and writes chunks; called from several threads."""

    def __init__(self, source: Source, files: _Files, *, chunk_bytes: int, pace: Pace) -> None:
        self._source, self._files, self._chunk_bytes, self._pace = source, files, chunk_bytes, pace

    def write(self, start: int) -> int:
        stop = min(start + self._chunk_bytes, self._source.bytes)
        padded = start + -(-(stop - start) // _PAGE) * _PAGE
        view = self._source.chunk(start, padded)
        digest = xxhash.xxh3_64_intdigest(view[: stop - start])
        self._pace.take(stop - start)
        if self._files.direct < 0 or start % _PAGE or not self._write_direct(view, start):
            _write_all(self._files.plain, view[: stop - start], start)
        self._source.release(start, stop)
        return digest

    def _write_direct(self, view: memoryview, start: int) -> bool:
        try:
            _write_all(self._files.direct, view, start)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            return False
        return True


def _write_all(handle: int, view: memoryview, at: int) -> None:
    while view:
        written = os.pwrite(handle, view, at)
        view, at = view[written:], at + written
