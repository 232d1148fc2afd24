"""Page-cache pinning: mapped files as memory that the card takes its bytes from by itself (DMA).

What lies there is mapped and made known to the CUDA driver, for reading only: copies then need no processor.
On an H200 they came to what pinned memory gives, 53.8 GB/s, on a day when 14 threads read 31 GB/s out of the
page cache. Known pages stay in memory until this is closed, so there is a limit to them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np

from stoker.load.pool import NativePool
from stoker.load.reading.chunks import Run
from stoker.load.reading.engines import PAGE, Bytes
from stoker.machine.allowed import free_bytes

EXTENT_BYTES = 64 << 20  # made known at once: 2 ms
_SHARE = 4  # this part of the memory that is free may be held, by all ranks of a node


@dataclass(kw_only=True, slots=True)
class _Mapped:
    """A file in memory, and which of its extents the driver knows."""

    data: Bytes
    address: int
    known: set[int] = field(default_factory=set)


class PageCache:
    """Files of which the driver knows what is in memory. Used by one thread; `close` is safe twice."""

    def __init__(self, pool: NativePool, *, room: int) -> None:
        self._pool, self._room = pool, room
        self._files: dict[tuple[int, int], _Mapped] = {}
        self.bytes = 0
        self.refused = ""

    def located(self, run: Run) -> list[Run]:
        """A run as stretches of memory, if all of it is there and known; else as it is."""
        if run.doubted != run.trusted or self.refused:
            return [run]
        state = os.fstat(run.file)
        if state.st_size < run.stop:  # cut short meanwhile: whoever reads it finds that
            return [run]
        inode = state.st_dev, state.st_ino
        if inode not in self._files:
            self._files[inode] = _map(run.file)
        file = self._files[inode]
        if not all(self._is_known(file, extent) for extent in _extents(run)):
            return [run]
        return [
            replace(run, start=start, stop=stop, at=run.at + start - run.start, memory=file.address + start)
            for start, stop in _cut(run)
        ]

    def close(self) -> None:
        for file in self._files.values():
            for extent in file.known:
                self._pool.unpin(file.address + extent * EXTENT_BYTES)
        self._files = {}

    def _is_known(self, file: _Mapped, extent: int) -> bool:
        if extent in file.known:
            return True
        data = file.data[extent * EXTENT_BYTES : (extent + 1) * EXTENT_BYTES]
        if self.bytes + len(data) > self._room or not _is_in_memory(data):
            return False
        try:
            self._pool.pin(data.ctypes.data, len(data))
        except OSError as error:
            self.refused = str(error)
            return False
        file.known.add(extent)
        self.bytes += len(data)
        return True


def spare_memory() -> int:
    """Bytes of the page cache that may be held in memory: of what the machine and its container have left."""
    return free_bytes() // _SHARE


def _map(file: int) -> _Mapped:
    data = np.frombuffer(mmap.mmap(file, 0, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    return _Mapped(data=data, address=data.ctypes.data)


def _extents(run: Run) -> range:
    return range(run.start // EXTENT_BYTES, -(-run.stop // EXTENT_BYTES))


def _cut(run: Run) -> Iterator[tuple[int, int]]:
    """The driver copies from one extent at a time."""
    for extent in _extents(run):
        begin = extent * EXTENT_BYTES
        yield max(run.start, begin), min(run.stop, begin + EXTENT_BYTES)


def _is_in_memory(data: Bytes) -> bool:
    """Whether all pages are: one that is not would have to be read here and now."""
    pages = np.zeros(-(-len(data) // PAGE), np.uint8)
    asked = ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), ctypes.c_void_p(pages.ctypes.data)
    return not _libc().mincore(*asked) and bool((pages & 1).all())


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
