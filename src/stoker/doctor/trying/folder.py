"""Disk trial: 64 MiB written, synced and read back in a file without a name: no ending leaves it behind."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from stoker.machine.places import within
from stoker.machine.plain import Unknown
from stoker.machine.trials import FolderTrial

BYTES, _BLOCK = 64 << 20, 4 << 20
_SYNCS = 5
_MOST_S = 15.0  # for a folder, whatever it is made of
_LEFT_FREE = 256 << 20  # a disk that is nearly full is not filled by us
_FEW = 200  # entries looked through for a file to read


def try_folder(role: str, path: Path) -> FolderTrial:
    """Write and read in a folder, or where nothing may be written read a file that lies there."""
    nothing = FolderTrial(role=role, path=str(path))
    found = within(_MOST_S, lambda: _tried(nothing, path))
    return found or replace(nothing, error=f"no answer in {_MOST_S:g} s")


def _tried(nothing: FolderTrial, path: Path) -> FolderTrial:
    try:
        if role_reads_only(nothing.role, path):
            return _read_there(nothing, path)
        stat = os.statvfs(path)
        free = stat.f_bavail * stat.f_frsize
        if free < BYTES + _LEFT_FREE:
            return replace(nothing, error=f"{free >> 20} MiB are free: too little to try")
        with _nameless(path) as descriptor:
            return _written_and_read(nothing, descriptor)
    except OSError as error:
        return replace(nothing, error=error.strerror or str(error))


def role_reads_only(role: str, path: Path) -> bool:
    """Whether a folder of data is left as it is: others' datasets are mostly mounted so."""
    return role == "data" and (
        not path.is_dir() or not os.access(path, os.W_OK | os.X_OK) or _is_frozen(path)
    )


def _is_frozen(path: Path) -> bool:
    return bool(os.statvfs(path).f_flag & os.ST_RDONLY)


@contextmanager
def _nameless(folder: Path) -> Iterator[int]:
    """A file that is gone when it is closed, also by SIGKILL; where the filesystem has no such thing, one
    whose name is taken away at once."""
    try:
        descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        descriptor, name = tempfile.mkstemp(prefix=".stoker-try-", dir=folder)
        os.unlink(name)
    try:
        yield descriptor
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _written_and_read(nothing: FolderTrial, descriptor: int) -> FolderTrial:
    with mmap.mmap(-1, _BLOCK) as block:
        block.write(os.urandom(_BLOCK))  # a disk that compresses must not find zeros
        syncs = [_synced(descriptor, block) for _ in range(_SYNCS)]
        direct = _past_the_cache(descriptor, block)
        begun = time.monotonic()
        for offset in range(0, BYTES, _BLOCK):
            _write_all(descriptor, block, offset)
        os.fsync(descriptor)
        written = time.monotonic()
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        for offset in range(0, BYTES, _BLOCK):
            os.preadv(descriptor, [block], offset)
        read = time.monotonic()
    return replace(
        nothing,
        write_bytes_s=BYTES / max(1e-9, written - begun),
        sync_s=statistics.median(syncs),
        read_bytes_s=BYTES / max(1e-9, read - written),
        direct=direct,
    )


def _synced(descriptor: int, block: mmap.mmap) -> float:
    begun = time.monotonic()
    os.pwrite(descriptor, block[:4096], 0)
    os.fsync(descriptor)
    return time.monotonic() - begun


def _past_the_cache(descriptor: int, block: mmap.mmap) -> bool:
    """Switch to O_DIRECT if the filesystem takes it: some refuse the flag, some only the first write."""
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.pwrite(descriptor, block, 0)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
        return False
    return True


def _write_all(descriptor: int, block: mmap.mmap, offset: int) -> None:
    """A quota or a full disk takes a part of a write, and says so with the next one."""
    written = os.pwrite(descriptor, block, offset)
    if written < len(block):
        os.pwrite(descriptor, block[written:], offset + written)
        raise OSError(errno.ENOSPC, "the disk took a part of a write")


def _read_there(nothing: FolderTrial, path: Path) -> FolderTrial:
    file = path if path.is_file() else _some_file(path)
    if file is None:
        return replace(
            nothing,
            write_bytes_s=None,
            sync_s=None,
            read_bytes_s=Unknown(reason="may not be written, and no file of 1 MiB was found to read"),
        )
    descriptor = os.open(file, os.O_RDONLY)
    try:
        with mmap.mmap(-1, _BLOCK) as block:
            direct, begun, total = _opened_direct(descriptor), time.monotonic(), 0
            while total < BYTES and (count := os.preadv(descriptor, [block], total)):
                total += count
                if count % 4096:  # the end of the file
                    break
            taken = time.monotonic() - begun
    finally:
        os.close(descriptor)
    return replace(
        nothing, write_bytes_s=None, sync_s=None, read_bytes_s=total / max(1e-9, taken), direct=direct
    )


def _opened_direct(descriptor: int) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_DIRECT)
    except OSError:
        return False
    return True


def _some_file(folder: Path) -> Path | None:
    looked = 0
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            looked += 1
            file = Path(root, name)
            if file.is_file() and not file.is_symlink() and file.stat().st_size >= 1 << 20:
                return file
            if looked >= _FEW:
                return None
    return None
