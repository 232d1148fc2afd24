"""I/O engines: `pread` into buffers of ours (the default), O_DIRECT, or a memory map."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE = 4096  # what O_DIRECT wants offsets, lengths and addresses to be multiples of
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK, since Linux 4.14; Python has no name for it
_HUGE = 4 << 20  # memory from this size on is asked for in huge pages
_STEP = 4 << 20  # read through a buffer at once: it stays in the processor's cache until it has been copied


class Engine(Protocol):
    """One way to read. `read` fills the whole buffer from any thread, or raises OSError or EOFError."""

    def open(self, path: Path) -> Any: ...
    def read(self, handle: Any, offset: int, out: Bytes) -> None: ...
    def close(self, handle: Any) -> None: ...
    def takes(self, out: Bytes) -> bool:
        """Whether it can read whole pages straight into this buffer."""


class Pread:
    """Through the page cache, into a buffer of the caller's."""

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read(self, handle: int, offset: int, out: Bytes) -> None:
        self.read_at_least(handle, offset, out, len(out))

    def read_at_least(self, handle: int, offset: int, out: Bytes, wanted: int) -> None:
        """Like `read`, of a buffer that may reach beyond the end of the file."""
        view, at = out.data, 0
        while at < wanted:
            got = os.preadv(handle, [view[at:]], offset + at)
            if not got:
                raise EOFError
            at += got

    def close(self, handle: int) -> None:
        os.close(handle)

    def takes(self, out: Bytes) -> bool:
        return True


class Direct(Pread):
    """Past the page cache (O_DIRECT): for corpora larger than memory, read once."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def open(self, path: Path) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)

    def read(self, handle: int, offset: int, out: Bytes) -> None:
        # most of an aligned read goes straight to where it is wanted, the rest through a buffer
        if offset % PAGE == 0 and self.takes(out):
            body = len(out) // PAGE * PAGE
            super().read(handle, offset, out[:body])
            offset, out = offset + body, out[body:]
        while len(out):
            step = _STEP - offset % _STEP
            self._read_unaligned(handle, offset, out[:step])
            offset, out = offset + step, out[step:]

    def takes(self, out: Bytes) -> bool:
        return bool(out.ctypes.data % PAGE == 0)

    def _read_unaligned(self, handle: int, offset: int, out: Bytes) -> None:
        lead = offset % PAGE
        wanted = lead + len(out)
        whole = self._scratch.take(-(-wanted // PAGE) * PAGE)
        self.read_at_least(handle, offset - lead, whole, wanted)
        out[:] = whole[lead:wanted]


class Mapped:
    """Through a memory map: nothing is copied twice, but every page touched counts as this process's."""

    def open(self, path: Path) -> Bytes:
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)

    def read(self, handle: Bytes, offset: int, out: Bytes) -> None:
        part = handle[offset : offset + len(out)]
        out[: len(part)] = part
        if len(part) < len(out):
            raise EOFError

    def close(self, handle: Bytes) -> None:
        pass  # unmapped with its last view

    def takes(self, out: Bytes) -> bool:
        return True


ENGINES: dict[str, Callable[[], Engine]] = {"pread": Pread, "direct": Direct, "mmap": Mapped}


class Scratch(threading.local):
    """A page-aligned buffer per thread, grown as needed."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, np.uint8)

    def take(self, size: int) -> Bytes:
        if len(self._buffer) < size:
            self._buffer = page_aligned(size)
        return self._buffer[:size]


def page_aligned(size: int) -> Bytes:
    """Anonymous memory of our own, aligned to a page."""
    # Shared memory, which is what mmap gives unless told otherwise, gets no huge pages on most machines.
    memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A fork while O_DIRECT reads into private memory may give the bytes to the child alone (open(2), NOTES):
    # let the child have memory of its own.
    memory.madvise(_WIPE_ON_FORK)
    if size >= _HUGE:  # a tenth off the time of reading into it
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)[:size]
