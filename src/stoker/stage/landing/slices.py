"""Sparse writes: where a large file lands, every slice hashed, written and noted in the map.

Where the digest of each slice is known beforehand (a dataset's blocks) it is checked as it comes, and a wrong
one stays missing. Else the digest of the whole file follows the slices.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import xxhash

from stoker.errors import BadShardError
from stoker.stage.landing.digest import Follower
from stoker.stage.landing.maps import SLICE_BYTES, known_blocks
from stoker.stage.landing.part import Part, check, write_all
from stoker.stage.origins.origin import RemoteFile

_WRITE_BACK_BYTES = 8 << 20  # asked of the disk at a time, so that the final sync finds little to do
_SYNC_FILE_RANGE_WRITE = 2
_PAGE = 4096  # what O_DIRECT writes multiples of


@contextmanager
def landing(part: Part, number: int, *, past_cache: bool = False) -> Iterator[Landing]:
    """The sink of one file of a part: verified and on the disk when the block ends well."""
    handle = part.open(number)
    try:
        place = Landing(part, number, handle, past_cache=past_cache)
        try:
            yield place
            place.finish()
        finally:
            place.close()
    finally:
        os.close(handle)


class Landing:
    """A sink. `write` may be called from many threads, of which each has a slice of its own."""

    def __init__(self, part: Part, number: int, handle: int, *, past_cache: bool = False) -> None:
        self._part, self._number, self._handle = part, number, handle
        self._file = part.unit.files[number]
        self._first = part.slices(number).start
        self._running: dict[int, xxhash.xxh3_64] = {}  # slices that have landed in part
        self._early: dict[int, list[tuple[int, int]]] = {}  # pieces that came before the one before them
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._front, self._end = self._first, part.slices(number).stop  # landed whole up to the front
        self._blocks = known_blocks(part.unit, number)
        follows = self._file.digest and not self._blocks
        self._follower = Follower(handle, self._file.bytes, like=self._file.digest) if follows else None
        # a follower reads back what came out of order: that must stay in the page cache
        self._direct = part.open_past_cache(number) if past_cache and not self._follower else -1
        self._advance()

    def write(self, offset: int, data: memoryview) -> None:
        index, start = divmod(offset, SLICE_BYTES)
        slice_number = self._first + index
        size = self._part.sizes[slice_number]
        whole = len(data) == size
        if whole and not self._is_sound(index, data):
            return  # it stays missing
        # The kernel lets one writer into a file at a time, and the others spin for their turn: on ext4 and 2
        # cores that took twice the CPU and half of the speed.
        with self._writing:
            if not (whole and self._wrote_past_cache(data, offset)):
                write_all(self._handle, data, offset)
        if self._follower:
            self._follower.offer(offset, data)
        if whole:
            self._part.note(slice_number, size, xxhash.xxh3_64_intdigest(data))
        else:
            with self._lock:
                self._add(slice_number, start, data)
        if self._part.landed[slice_number] == size:
            self._complete(index, is_checked=whole or not self._blocks)

    def _wrote_past_cache(self, data: memoryview, offset: int) -> bool:
        if self._direct < 0 or len(data) % _PAGE:
            return False
        try:
            return os.pwrite(self._direct, data, offset) == len(data)
        except OSError as error:
            if error.errno != errno.EINVAL:  # which says: not these bytes, or not here
                raise
            return False

    def finish(self) -> None:
        """Check the whole file and bring it to the disk."""
        if missing := self._part.missing(self._number):
            raise _not_whole(self._file, missing)
        found = self._follower.digest() if self._follower else ""
        check(self._file, self._file.bytes, found)
        os.fdatasync(self._handle)

    def close(self) -> None:
        if self._follower:
            self._follower.close()
        if self._direct >= 0:
            os.close(self._direct)
            self._direct = -1

    def _add(self, slice_number: int, start: int, data: memoryview) -> None:
        """A piece of a slice. What was not read just now is read back from the page cache."""
        landed = self._part.landed[slice_number]
        if start > landed:
            self._early.setdefault(slice_number, []).append((start, start + len(data)))
            return
        running = self._running.get(slice_number) or self._rehash(slice_number, landed)
        running.update(data[landed - start :])
        landed = max(landed, start + len(data))
        for begin, end in sorted(self._early.get(slice_number, ())):
            if begin <= landed < end:
                running.update(self._read(slice_number, landed, end))
                landed = end
        self._running[slice_number] = running
        self._part.note(slice_number, landed, running.intdigest())

    def _complete(self, index: int, *, is_checked: bool) -> None:
        slice_number = self._first + index
        self._running.pop(slice_number, None)
        self._early.pop(slice_number, None)
        if not (is_checked or self._is_sound(index, self._read(slice_number, 0, SLICE_BYTES))):
            self._part.reject(self._number, slice_number)
            return
        if self._follower:
            self._advance()
        if self._direct < 0 and (index + 1) * SLICE_BYTES % _WRITE_BACK_BYTES == 0:
            _write_back(self._handle, index * SLICE_BYTES + SLICE_BYTES - _WRITE_BACK_BYTES)

    def _is_sound(self, index: int, data: memoryview | bytes) -> bool:
        return not self._blocks or self._blocks.vouch_for(index * SLICE_BYTES, data)

    def _rehash(self, slice_number: int, landed: int) -> xxhash.xxh3_64:
        return xxhash.xxh3_64(self._read(slice_number, 0, landed))

    def _read(self, slice_number: int, start: int, stop: int) -> bytes:
        return os.pread(self._handle, stop - start, (slice_number - self._first) * SLICE_BYTES + start)

    def _advance(self) -> None:
        with self._lock:
            landed, sizes = self._part.landed, self._part.sizes
            while self._front < self._end and landed[self._front] == sizes[self._front]:
                self._front += 1
            if self._follower:
                self._follower.advance(min((self._front - self._first) * SLICE_BYTES, self._file.bytes))


def _not_whole(file: RemoteFile, missing: list[tuple[int, int]]) -> BadShardError:
    at = ", ".join(f"{start:,} to {stop:,}" for start, stop in missing[:3])
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return BadShardError(
        f"{file.url} arrived as other bytes than its manifest says, from {at}{more}",
        hint="they were damaged on the way or at the origin: run the same command again, or check the origin "
        "with `stoker prepare verify`",
    )


def _write_back(handle: int, offset: int) -> None:
    """Ask the kernel to begin writing; a filesystem that cannot is written at the final sync."""
    with suppress(AttributeError):
        _libc().sync_file_range(
            handle, ctypes.c_int64(offset), ctypes.c_int64(_WRITE_BACK_BYTES), _SYNC_FILE_RANGE_WRITE
        )


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
