"""Reading shard files: verified, shared by all reading threads.

Every block has a digest beside the manifest. It is checked when a block is first read, by reading the
whole block, and remembered; after that reads take just the bytes they need. A bad block raises, or is
remembered as bad for the caller to skip and count, by policy. Files that can be brought again are, once
for each bad block, before that.

Any thread may call any method.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.errors import BadShardError, StokerError, StorageError, UsageError
from stoker.formats.zstd import SeekableReader
from stoker.load.engines import ENGINES, Bytes, Scratch

_OPEN_FILES = 256  # kept open; beyond that a file is opened for one read


class Files(Protocol):
    """Where the dataset's files lie: a folder, or a cache that brings them near first. Called from
    reading threads."""

    def local_path(self, name: str) -> Path: ...


@runtime_checkable
class CachedFiles(Files, Protocol):
    """Files that may be evicted when they are not read, and brought again when they are damaged."""

    open_files: int  # how many the reader may keep open: an open file takes its space, evicted or not

    def release(self, name: str) -> None: ...
    def refetch(self, name: str, *, damaged: int) -> None:
        """Bring it again, unless the inode found damaged (0: none) has been replaced already."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on a mounted filesystem."""

    root: Path

    def local_path(self, name: str) -> Path:
        return self.root / name


@dataclass(kw_only=True, slots=True)
class Damage:
    """What was found bad so far."""

    blocks: int = 0
    samples: int = 0
    named: list[str] = field(default_factory=list)
    healed: list[str] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Open:
    """An open file; closed when it is not wanted any more and nobody reads from it."""

    handle: Any
    inode: int
    readers: int = 0
    wanted: bool = True


class ShardReader:
    """Reads stretches of a dataset's files and verifies each block the first time."""

    def __init__(
        self,
        files: Files,
        *,
        sizes: dict[str, int],
        digests: dict[str, npt.NDArray[np.uint64]],
        block_bytes: int,
        engine: str = "pread",
        on_corrupt: str = "raise",
    ) -> None:
        if on_corrupt not in ("raise", "skip"):
            raise UsageError(f"on_corrupt={on_corrupt!r} is unknown", hint="use 'raise' or 'skip'")
        if engine not in ENGINES:
            raise UsageError(f"reader={engine!r} is unknown", hint=f"use one of {', '.join(ENGINES)}")
        self._engine = ENGINES[engine]()
        self._files, self._sizes, self._digests = files, sizes, digests
        self._block_bytes = block_bytes
        self.skips = on_corrupt == "skip"
        self._good = {name: np.zeros(len(blocks), bool) for name, blocks in digests.items()}
        self._bad: dict[str, set[int]] = {}
        self._cached = files if isinstance(files, CachedFiles) else None
        self._most_open = self._cached.open_files if self._cached else _OPEN_FILES
        self._handles: OrderedDict[str, _Open] = OrderedDict()  # the latest used last
        self._tried: set[tuple[str, int]] = set()
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self.damage = Damage()

    def read(self, name: str, start: int, out: Bytes) -> list[tuple[int, int]]:
        """Fill `out` with the bytes from `start` on; the stretches of it that are damaged (by policy)."""
        first, last = start // self._block_bytes, (start + len(out) - 1) // self._block_bytes
        try:
            return self._read(name, start, out, first, last)
        except BadShardError as error:
            tried = self._tried.intersection((name, block) for block in range(first, last + 1))
            if tried or not self._heals(name, first, error.message):
                raise
        return self._read(name, start, out, first, last)

    def _read(self, name: str, start: int, out: Bytes, first: int, last: int) -> list[tuple[int, int]]:
        with self._opened(name) as file:
            self._read_bytes(name, file, start, out)
            if not len(self._digests[name]):
                return []
            unsure = (first + np.flatnonzero(~self._good[name][first : last + 1])).tolist()
            bad = [block for block in unsure if not self._verify(name, file, block, start, out)]
        for block in bad:
            if not self._read_healed(name, block, start, out):
                self._mark_bad(name, block)
        return self._bad_parts(name, start, len(out)) if name in self._bad else []

    def path_if_verified(self, name: str, start: int, stop: int) -> Path | None:
        """The file, if all blocks of this stretch have been found good."""
        first, last = start // self._block_bytes, (stop - 1) // self._block_bytes
        return self._files.local_path(name) if self._good[name][first : last + 1].all() else None

    def _verify(self, name: str, file: _Open, block: int, start: int, out: Bytes) -> bool:
        """Whether a block, of which `out` holds at least a part, is what its digest says."""
        begin, end = self._bounds(name, block)
        inside = out[max(0, begin - start) : end - start]
        whole = inside
        if len(inside) < end - begin:
            whole = self._scratch.take(end - begin)
            self._read_bytes(name, file, begin, whole)
            # what is handed on must be the very bytes that were verified
            from_start = max(start - begin, 0)
            inside[:] = whole[from_start : from_start + len(inside)]
        good = xxhash.xxh3_64_intdigest(whole.data) == int(self._digests[name][block])
        self._good[name][block] = good
        return good

    def _read_healed(self, name: str, block: int, start: int, out: Bytes) -> bool:
        """Have the file brought again and read the block from it; False if that cannot help."""
        if not self._heals(name, block, self._problem(name, block)):
            return False
        begin, end = self._bounds(name, block)
        with self._opened(name) as file:
            self._read_bytes(name, file, max(begin, start), out[max(0, begin - start) : end - start])
            return self._verify(name, file, block, start, out)

    def _heals(self, name: str, block: int, problem: str) -> bool:
        """Bring a damaged file again, once for each block: twice the same damage is at its origin."""
        with self._lock:
            if self._cached is None or (name, block) in self._tried:
                return False
            self._tried.add((name, block))
            inode = self._handles[name].inode if name in self._handles else 0
        try:
            self._cached.refetch(name, damaged=inode)
        except StokerError as error:
            if self.skips:
                return False
            raise BadShardError(
                f"{problem}, and cannot be fetched again: {error.message}", hint=error.hint
            ) from error
        with self._lock:
            self.damage.healed.append(f"{problem}: fetched again")
            if name in self._handles and self._handles[name].inode == inode:
                self._retire(self._handles.pop(name))
        return True

    def _bounds(self, name: str, block: int) -> tuple[int, int]:
        begin = block * self._block_bytes
        return begin, min(begin + self._block_bytes, self._sizes[name])

    def _read_bytes(self, name: str, file: _Open, start: int, out: Bytes) -> None:
        try:
            if file.handle is not None:
                self._engine.read(file.handle, start, out)
        except EOFError:
            self._unreadable(
                name, f"ends before byte {start + len(out):,}, its manifest says {self._sizes[name]:,}"
            )
        except OSError as error:
            self._unreadable(name, f"cannot be read at byte {start:,}: {error.strerror}")

    def _problem(self, name: str, block: int) -> str:
        at = block * self._block_bytes
        return f"{name}: block {block} (bytes {at:,} to {at + self._block_bytes:,}) differs from its digest"

    def _mark_bad(self, name: str, block: int) -> None:
        problem = self._problem(name, block)
        with self._lock:
            if block in self._bad.setdefault(name, set()):
                return
            self._bad[name].add(block)
            self.damage.blocks += 1
            self.damage.named.append(problem)
        if not self.skips:
            raise BadShardError(f"{problem}: its data is damaged", hint=self.cure(name))

    def _unreadable(self, name: str, what: str) -> None:
        if not self.skips:
            raise BadShardError(f"{name} {what}", hint=self.cure(name))
        # the digests will not match what is in the buffer, which marks the blocks as bad

    def _bad_parts(self, name: str, start: int, length: int) -> list[tuple[int, int]]:
        size = self._block_bytes
        parts = ((b * size - start, (b + 1) * size - start) for b in sorted(self._bad[name]))
        return [(max(0, a), min(length, z)) for a, z in parts if a < length and z > 0]

    def cure(self, name: str) -> str:
        return (
            f"delete {self._files.local_path(name)} and stage or copy it again; `stoker prepare verify` "
            "lists all damage; on_corrupt='skip' trains on without it"
        )

    @contextmanager
    def _opened(self, name: str) -> Iterator[_Open]:
        """An open file for one read; the latest used stay open."""
        with self._lock:
            file = self._handles.get(name)
            if file is not None:
                self._handles.move_to_end(name)
                file.readers += 1
        if file is None:
            file = self._open(name)
        try:
            yield file
        finally:
            with self._lock:
                file.readers -= 1
                if not file.wanted:
                    self._retire(file)

    def _open(self, name: str) -> _Open:
        try:
            file = self._open_path(name)
        except OSError as error:
            if self.skips:
                self._unreadable(name, str(error))
                return _Open(handle=None, inode=0, readers=1)
            raise StorageError(
                f"cannot open {self._files.local_path(name)}: {error.strerror}", hint=self._open_hint(error)
            ) from error
        with self._lock:
            if name in self._handles:  # another thread was quicker
                file.wanted = False
                return file
            self._handles[name] = file
            if len(self._handles) > self._most_open:
                oldest, closing = self._handles.popitem(last=False)
                self._retire(closing)
                if self._cached:
                    self._cached.release(oldest)
        return file

    def _open_path(self, name: str) -> _Open:
        path = self._files.local_path(name)
        if self._cached and not path.exists():  # somebody tidied up
            self._cached.refetch(name, damaged=0)
        return _Open(inode=path.stat().st_ino, handle=self._engine.open(path), readers=1)

    def _retire(self, file: _Open) -> None:
        """Close it now, or when its last reader is done. The lock is held."""
        file.wanted = False
        if not file.readers and file.handle is not None:
            handle, file.handle = file.handle, None
            with suppress(OSError):
                self._engine.close(handle)

    @staticmethod
    def _open_hint(error: OSError) -> str:
        if error.errno == 22:
            return "this filesystem has no O_DIRECT: use reader='pread'"
        return "check that the shard was staged, and its permissions"

    def close(self) -> None:
        """Close the files; safe twice."""
        with self._lock:
            handles, self._handles = self._handles, OrderedDict()
            for file in handles.values():
                self._retire(file)
        if self._cached:
            for name in handles:
                self._cached.release(name)


class PlainFile(io.RawIOBase):
    """A file of the dataset as a stream of verified bytes; what the zstd reader decompresses from."""

    def __init__(self, reader: ShardReader, name: str, size: int) -> None:
        super().__init__()
        self._reader, self._name, self._size, self._at = reader, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:  # any writable buffer
        length = max(0, min(len(buffer), self._size - self._at))
        out = np.frombuffer(buffer, np.uint8)[:length]
        if length:
            if self._reader.read(self._name, self._at, out):
                # part of an index or of a compressed frame: nothing of it can be used
                raise BadShardError(f"{self._name} is damaged", hint=self._reader.cure(self._name))
            self._at += length
        return length


def open_zstd(reader: ShardReader, name: str, size: int) -> SeekableReader:
    """The plain bytes of a compressed file. One thread at a time."""
    file: Any = PlainFile(reader, name, size)
    return SeekableReader(file, name=name)
