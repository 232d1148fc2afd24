"""O_DIRECT reads of samples of one size in files: whole sectors, so both ends are rounded."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_SECTOR = 4096


class Direct:
    """Open files of samples. Any thread may read, into a buffer of its own."""

    def __init__(self, paths: Sequence[Path], *, sample_bytes: int, in_a_file: int) -> None:
        self._bytes, self._in_a_file = sample_bytes, in_a_file
        self.samples = len(paths) * in_a_file
        self.is_direct = _takes_direct(paths[0])
        flags = os.O_RDONLY | (os.O_DIRECT if self.is_direct else 0)
        self._paths, self._flags = paths, flags
        # many small files are opened as they are read, as a dataset of many files is
        self._open = [os.open(path, flags) for path in paths] if in_a_file > 1 else []

    def __enter__(self) -> Direct:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._open:
            os.close(descriptor)
        self._open = []

    def buffer(self) -> mmap.mmap:
        """Room for a sample and the sectors it begins and ends in, aligned."""
        return mmap.mmap(-1, _sectors(self._bytes) + 2 * _SECTOR)

    def read(self, sample: int, buffer: mmap.mmap) -> int:
        """Read a sample; the bytes that were read for it."""
        file, number = divmod(sample, self._in_a_file)
        if self._open:
            return self._read(self._open[file], number, buffer)
        descriptor = os.open(self._paths[file], self._flags)
        try:
            count = self._read(descriptor, number, buffer)
            if not self.is_direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            return count
        finally:
            os.close(descriptor)

    def _read(self, descriptor: int, number: int, buffer: mmap.mmap) -> int:
        begin = number * self._bytes // _SECTOR * _SECTOR
        wanted = _sectors((number + 1) * self._bytes) - begin
        done = 0
        with memoryview(buffer) as view:
            while done < wanted and (count := os.preadv(descriptor, [view[done:wanted]], begin + done)):
                done += count
                if count % _SECTOR:  # the end of the file
                    break
        if begin + done < (number + 1) * self._bytes:
            raise OSError(5, "a file is shorter than it was written")
        return done


def _sectors(size: int) -> int:
    return -(-size // _SECTOR) * _SECTOR


def _takes_direct(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, _SECTOR) as block:
            os.preadv(descriptor, [block], 0)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True
