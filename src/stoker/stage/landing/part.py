"""Resumable downloads: a unit on its way, its files as far as they have landed, and a map of how far that is.

    FOLDER/map      a line of JSON that names the unit, then 16 bytes a slice: bytes landed and their xxh3
    FOLDER/0 1 …    the files, in the unit's order; gone from here once published

The map is written after the bytes. Nothing in it is trusted: whoever goes on with a part hashes what
lies on the disk and keeps the slices that are what the map says. A torn write, a lost page or a foreign
leftover therefore costs a slice to be fetched again, and nothing else.

A folder belongs to one owner. Another may move it to a name of his own only when the first is known to be
dead; else he copies, hash by hash, into files of his own: a paused owner that wakes up writes into
files that nobody will ever publish.
"""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from stoker.errors import BadShardError, StorageError
from stoker.stage.disk.grounds import Grounds, remove_tree
from stoker.stage.landing.digest import digest_of
from stoker.stage.landing.lay import move_files, write_files
from stoker.stage.landing.maps import (
    ENTRY,
    SLICE_BYTES,
    first_slices,
    header_of,
    is_part_of,
    opened,
    slice_sizes,
    sound_slices,
)
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit
from stoker.storage import is_local, local_path

_SYNC_EACH = 16
# At once: staging 2 GiB to ext4 took 4.4 s of CPU in writes of 1 MiB, 1.8 s in these, 2.0 s in 64 KiB. The
# difference is spent copying into the page cache; likely the large folios that large writes get are memory
# which the virtual machine has to ask back from its host.
_WRITE_BYTES = 256 << 10
_OWN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC  # of files in a folder of our own


class Part:
    """A unit's landing place. Sinks may be written from many threads; the rest is one thread's."""

    def __init__(self, folder: Path, unit: Unit, *, grounds: Grounds) -> None:
        """Begin, or go on with what lies in our `folder`; the unit's files will be in `grounds`."""
        self.folder, self.unit, self._grounds = folder, unit, grounds
        # plain strings where there may be thousands: a Path costs more than the system call it is for
        base = grounds.folder / unit.folder
        self._homes = [f"{base}/{file.name}" for file in unit.files]
        self._first = first_slices(unit)
        self.sizes = [size for file in unit.files for size in slice_sizes(file)]
        self.landed = [0] * len(self.sizes)  # of each slice, from its start
        self.digests = [0] * len(self.sizes)  # the xxh3 of what has landed
        self._published = [False] * len(unit.files)
        self._unsaid: list[int] = []  # slices of small files that have landed and are not in the map yet
        self._unsaid_bytes = 0
        self._lock = threading.Lock()
        folder.mkdir(mode=0o750 if grounds.shared else 0o755, exist_ok=True)
        self._adopt_own()
        self._map = os.open(folder / "map", _OWN_FLAGS, 0o644)
        self._entries_at = self._write_header()

    def _adopt_own(self) -> None:
        """Keep what lies here already, if it is this unit's."""
        if not is_part_of(self.folder, self.unit):
            return
        for _, slice_number, data, digest in sound_slices(self.folder, self.unit, self._homes):
            self.landed[slice_number], self.digests[slice_number] = len(data), digest
        for number in range(len(self.unit.files)):
            moved = not os.path.lexists(self._path(number)) and os.path.lexists(self._homes[number])
            if moved and self.unit.files[number].bytes and not self.missing(number):
                self._published[number] = True
            elif moved:  # what lies at home is not this content: it is fetched anew
                for slice_number in self.slices(number):
                    self.landed[slice_number] = 0

    def copy_from(self, other: Path) -> None:
        """Take over what has landed in another's folder, who may still be writing to it."""
        mine = handle = -1
        for number, slice_number, data, digest in sound_slices(other, self.unit, self._homes):
            if self.landed[slice_number] >= len(data):
                continue
            if number != mine:
                _close(handle)
                mine, handle = number, self.open(number)
            offset = (slice_number - self._first[number]) * SLICE_BYTES
            write_all(handle, data, offset)
            self.note(slice_number, len(data), digest)
        _close(handle)

    def missing(self, number: int) -> list[tuple[int, int]]:
        """The stretches of a file that have yet to land."""
        ranges: list[tuple[int, int]] = []
        for slice_number in self.slices(number):
            begin = (slice_number - self._first[number]) * SLICE_BYTES
            start, stop = begin + self.landed[slice_number], begin + self.sizes[slice_number]
            if start == stop:
                continue
            if ranges and ranges[-1][1] == start:
                ranges[-1] = (ranges[-1][0], stop)
            else:
                ranges.append((start, stop))
        return ranges

    def partly_landed(self) -> list[int]:
        """The files of which something lies here, and not all."""
        return [
            number
            for number in range(len(self.unit.files))
            if self.missing(number) and any(self.landed[one] for one in self.slices(number))
        ]

    def put(self, files: Sequence[tuple[int, memoryview]]) -> None:
        """Whole small files by their numbers, each out of one hand."""
        digests = [self._checked(number, data) for number, data in files]
        write_files([(self._path(number), data) for number, data in files])
        with self._lock:
            for (number, data), found in zip(files, digests, strict=True):
                for slice_number, digest in zip(self.slices(number), found, strict=True):
                    self.landed[slice_number] = self.sizes[slice_number]
                    self.digests[slice_number] = digest
                    self._unsaid.append(slice_number)
                self._unsaid_bytes += len(data)
            if self._unsaid_bytes >= SLICE_BYTES:
                self._say()

    def _checked(self, number: int, data: memoryview) -> list[int]:
        """The xxh3 of each slice of a file that is what it should be."""
        file = self.unit.files[number]
        pieces = (data[at : at + SLICE_BYTES] for at in range(0, len(data), SLICE_BYTES))
        digests = [xxhash.xxh3_64_intdigest(piece) for piece in pieces]
        check(file, len(data), _digest(data, file.digest, digests))
        return digests

    def link(self, number: int, name: str, folder: int) -> None:
        """Take a whole file that lies in an open folder, and was found right, as it is: by another name."""
        linked = f"{self._path(number)}.link"
        os.link(name, linked, src_dir_fd=folder, follow_symlinks=False)
        os.rename(linked, self._path(number))
        with opened(self._path(number)) as handle:
            for slice_number in self.slices(number):
                begin = (slice_number - self._first[number]) * SLICE_BYTES
                data = os.pread(handle, self.sizes[slice_number], begin)
                self.note(slice_number, len(data), xxhash.xxh3_64_intdigest(data))

    def forget(self, number: int) -> None:
        """Trust nothing of this file: it will be fetched from its first byte."""
        self._published[number] = False
        for slice_number in self.slices(number):
            self.note(slice_number, 0, 0)

    def reject(self, number: int, slice_number: int) -> None:
        """This slice is not what it should be. Of a file that has its name already none is: it will be
        replaced as a whole."""
        if self._published[number]:
            self.forget(number)
        else:
            self.note(slice_number, 0, 0)

    def sync(self) -> None:
        """Small files to the disk: a few one by one; many at once, since a sync each would take longer than
        to fetch them, although that waits for what others wrote to the same filesystem too."""
        if len(self._homes) > _SYNC_EACH and not ctypes.CDLL(None).syncfs(self._map):
            return
        for number in range(len(self._homes)):
            with suppress(FileNotFoundError), opened(self._path(number)) as handle:
                os.fdatasync(handle)

    def publish(self, record: bytes) -> Path:
        """Move the files to their names. Everything is verified and on the disk. Returns the record's
        place, for the caller to move to its own: what others look for comes last."""
        try:
            unpublished = [n for n, is_home in enumerate(self._published) if not is_home]
            self.put([(n, memoryview(b"")) for n in unpublished if not self.unit.files[n].bytes])
            self._move_home(unpublished)
        except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
            raise _in_the_way(error) from error
        path = self.folder / "record"
        path.write_bytes(record)
        return path

    def _move_home(self, numbers: Sequence[int]) -> None:
        """Folder by folder, each entered without following a link."""
        homes: dict[str, list[int]] = {}
        for number in numbers:
            homes.setdefault(self.unit.files[number].name.rpartition("/")[0], []).append(number)
        for below, here in homes.items():
            with self._grounds.made("/".join(filter(None, (self.unit.folder, below)))) as folder:
                self._move_into(folder, here)

    def _move_into(self, folder: int, numbers: Sequence[int]) -> None:
        for number in numbers:
            if (mode := self._mode(number)) is not None:
                os.chmod(self._path(number), mode)
        names = {os.path.basename(self._homes[number]): number for number in numbers}
        try:
            move_files(folder, [(self._path(number), name) for name, number in names.items()])
        except OSError as error:
            error.filename2 = self._homes[names[error.filename2]]  # which is what a person can look for
            raise

    def _mode(self, number: int) -> int | None:
        """Who may read a file, where that is not for the umask to say: the group that shares a cache, and
        nobody whom the original, on a mounted filesystem, keeps out."""
        may = 0o640 if self._grounds.shared else None
        url = self.unit.files[number].url
        if is_local(url):
            with suppress(OSError):
                source = stat.S_IMODE(os.stat(local_path(url)).st_mode) & 0o644 | 0o600
                may = source & may if may else source if source != 0o644 else None
        return may

    def say(self) -> None:
        """Let others see in the map what has landed so far."""
        with self._lock:
            self._say()

    def close(self) -> None:
        """Close the map; safe twice."""
        if self._map >= 0:
            with suppress(OSError):  # of a full disk, say: these are fetched again
                self._say()
        _close(self._map)
        self._map = -1

    def remove(self) -> None:
        self.close()
        remove_tree(self.folder)

    def open(self, number: int) -> int:
        """A handle on a file of the part, at its full size; to be closed."""
        handle = os.open(self._path(number), _OWN_FLAGS, 0o644)
        os.truncate(handle, self.unit.files[number].bytes)
        return handle

    def open_past_cache(self, number: int) -> int:
        """A second handle that writes whole pages past the page cache; below 0 where there is none."""
        try:
            return os.open(self._path(number), os.O_WRONLY | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return -1

    def _path(self, number: int) -> str:
        return f"{self.folder}/{number}"

    def slices(self, number: int) -> range:
        """The numbers of a file's slices."""
        return range(self._first[number], self._first[number + 1])

    def note(self, slice_number: int, landed: int, digest: int) -> None:
        """The first bytes of a slice are on their place. Any thread, one per slice."""
        os.pwrite(self._map, ENTRY.pack(landed, digest), self._entries_at + slice_number * ENTRY.size)
        self.landed[slice_number], self.digests[slice_number] = landed, digest

    def _say(self) -> None:
        """Small files that have landed, into the map: a write for all since the last. A kill costs these."""
        if self._unsaid:
            first, last = min(self._unsaid), max(self._unsaid) + 1
            noted = zip(self.landed[first:last], self.digests[first:last], strict=True)
            entries = b"".join(ENTRY.pack(landed, digest) for landed, digest in noted)
            os.pwrite(self._map, entries, self._entries_at + first * ENTRY.size)
            self._unsaid, self._unsaid_bytes = [], 0

    def _write_header(self) -> int:
        header = header_of(self.unit)
        if os.pread(self._map, len(header), 0) != header:
            os.ftruncate(self._map, 0)
            os.pwrite(self._map, header, 0)
        os.ftruncate(self._map, len(header) + len(self.landed) * ENTRY.size)
        return len(header)


def _digest(data: memoryview, like: str, slices: list[int]) -> str:
    """The digest of a whole file, as it is named in `like`; of one slice the xxh3 is known already."""
    if len(slices) == 1 and like.startswith("xxh3:"):
        return f"xxh3:{slices[0]:016x}"
    return digest_of(data, like) if like else ""


def check(file: RemoteFile, size: int, digest: str) -> None:
    if size != file.bytes or (digest and digest != file.digest):
        found = f"{size:,} bytes, {digest or 'no digest'}"
        raise BadShardError(
            f"{file.url} arrived as {found}; it should be {file.bytes:,} bytes, {file.digest or 'no digest'}",
            hint="it was damaged on the way or at its origin: run the same command again, or check the "
            "origin with `stoker prepare verify`",
        )


def write_all(handle: int, data: memoryview | bytes, offset: int) -> None:
    view = memoryview(data)
    while len(view):
        wrote = os.pwrite(handle, view[:_WRITE_BYTES], offset)
        view, offset = view[wrote:], offset + wrote


def _in_the_way(error: OSError) -> StorageError:
    where = error.filename2 or error.filename
    return StorageError(
        f"{where} is in the way: the origin has a folder now where it had a file, or the other way round",
        hint=f"delete {where} and run the same command again",
    )


def _close(handle: int) -> None:
    if handle >= 0:
        os.close(handle)
