"""The map of a part: what has landed of a unit, as anybody reads it who did not write it.

Nothing in it is trusted: a slice counts if its bytes hash to what the map says, and to what the origin says
where that is known.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

from stoker.errors import StorageError
from stoker.stage.disk.records import MOST_BYTES, read_record, record_bytes, total_bytes
from stoker.stage.landing.digest import BlockDigests
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit

SLICE_BYTES = 1 << 20
ENTRY = struct.Struct("<QQ")  # bytes landed from the start of the slice, and their xxh3


def is_part_of(folder: Path, unit: Unit) -> bool:
    """Whether what lies in this folder is on its way to be this very unit."""
    header = header_of(unit)
    try:
        with opened(f"{folder}/map") as handle:
            return os.pread(handle, len(header), 0) == header
    except OSError:
        return False


def reserved_bytes(folder: Path) -> tuple[int, int]:
    """What the files of a part will take in the end, and how much of it they have not taken yet."""
    try:
        with opened(f"{folder}/map") as handle:
            line, newline, _ = os.pread(handle, MOST_BYTES, 0).partition(b"\n")
        total = total_bytes(line) if newline else 0
    except (OSError, ValueError, RecursionError):
        return 0, 0
    taken = 0
    for path in entries(folder):
        with suppress(OSError):
            taken += path.lstat().st_blocks * 512
    return total, max(0, total - taken)


def unit_on_its_way(folder: Path, key: str) -> Unit | None:
    """What a part says that it is going to be, if that could be ours."""
    try:
        with opened(f"{folder}/map") as handle:
            return read_record(key, os.pread(handle, MOST_BYTES, 0).partition(b"\n")[0])
    except (OSError, ValueError, RecursionError, StorageError):
        return None


@contextmanager
def opened(path: str) -> Iterator[int]:
    """A plain file that another may have laid here: a link is not followed, a FIFO not waited for."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise FileNotFoundError(errno.ENOENT, "no plain file", path)
        yield handle
    finally:
        os.close(handle)


def entries(folder: Path) -> list[Path]:
    """What lies in a folder; nothing if it is gone, as others' folders may be at any moment."""
    try:
        return [folder / name for name in sorted(os.listdir(folder))]
    except (FileNotFoundError, NotADirectoryError):
        return []


def sound_slices(folder: Path, unit: Unit, homes: list[str]) -> Iterator[tuple[int, int, bytes, int]]:
    """The slices of a part whose bytes are what its map says, and what they should be where that is known:
    file, slice, bytes, xxh3. A file that is gone from here may have been published before its owner died:
    then it lies at home."""
    if not is_part_of(folder, unit):
        return
    first, entries = first_slices(unit), _map_entries(folder, unit)
    for number in range(len(unit.files)):
        path, blocks = f"{folder}/{number}", known_blocks(unit, number)
        with suppress(OSError), opened(path if os.path.lexists(path) else homes[number]) as handle:
            for slice_number in range(first[number], first[number + 1]):
                landed, digest = _entry(entries, slice_number)
                begin = (slice_number - first[number]) * SLICE_BYTES
                size = min(SLICE_BYTES, unit.files[number].bytes - begin)
                if not 0 < landed <= size:
                    continue
                data = os.pread(handle, landed, begin)
                is_right = blocks is None or landed < size or blocks.vouch_for(begin, data)
                if is_right and xxhash.xxh3_64_intdigest(data) == digest:
                    yield number, slice_number, data, digest


def has_landed(folder: Path, unit: Unit, number: int, slices: range) -> bool:
    """Whether these slices of a file lie whole in a part, which another may be writing to: what its map says
    of them, they are."""
    if not is_part_of(folder, unit):
        return False
    first, entries = first_slices(unit)[number], _map_entries(folder, unit)
    sizes = slice_sizes(unit.files[number])
    if not first <= slices.start <= slices.stop <= first + len(sizes):
        return False
    try:
        with opened(f"{folder}/{number}") as handle:
            for slice_number in slices:
                landed, digest = _entry(entries, slice_number)
                index = slice_number - first
                data = os.pread(handle, landed, index * SLICE_BYTES) if landed == sizes[index] else b""
                if not data or xxhash.xxh3_64_intdigest(data) != digest:
                    return False
    except OSError:
        return False
    return True


def _entry(entries: bytes, slice_number: int) -> tuple[int, int]:
    entry = entries[slice_number * ENTRY.size : (slice_number + 1) * ENTRY.size]
    landed, digest = ENTRY.unpack(entry) if len(entry) == ENTRY.size else (0, 0)
    return landed, digest


def _map_entries(folder: Path, unit: Unit) -> bytes:
    count = first_slices(unit)[-1] * ENTRY.size
    with suppress(OSError), opened(f"{folder}/map") as handle:
        return os.pread(handle, count, len(header_of(unit)))
    return b""


def known_blocks(unit: Unit, number: int) -> BlockDigests | None:
    """The digests of all blocks of a file, where they are known."""
    found = unit.blocks[number] if unit.blocks else None
    return found if found and found.cover(unit.files[number].bytes) else None


def header_of(unit: Unit) -> bytes:
    return record_bytes(unit) + b"\n"


def first_slices(unit: Unit) -> list[int]:
    """The number of each file's first slice, and how many there are."""
    first = [0]
    for file in unit.files:
        first.append(first[-1] - -file.bytes // SLICE_BYTES)
    return first


def slice_sizes(file: RemoteFile) -> list[int]:
    whole, rest = divmod(file.bytes, SLICE_BYTES)
    return [SLICE_BYTES] * whole + [rest] * (rest > 0)
