"""Shard reader: blocks verified when first read, shared by all reading threads.

Every block has a digest beside the manifest. It is checked when a block is first read, by reading the
whole block, and remembered; after that reads take just the bytes they need. A bad block raises, or is
remembered as bad for the caller to skip and count, by policy. A file that can be brought again is, once
for each bad block, before that.

Any thread may call any method.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.errors import BadShardError, StokerError, StorageError, UsageError
from stoker.load.reading.engines import ENGINES, Bytes, Engine, Scratch
from stoker.load.reading.files import CachedFiles, Files

_STEP_BYTES = 1 << 20  # verified at once: it stays in the processor's cache from the read to the hash
_OPEN_FILES = 256  # kept open; beyond that a file is opened for one read


@dataclass(kw_only=True, slots=True)
class Damage:
    """What was found bad so far."""

    blocks: int = 0
    samples: int = 0
    named: list[str] = field(default_factory=list)
    healed: list[str] = field(default_factory=list)


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
            raise UsageError(f"reader={engine!r} is unknown", hint=f"use {', '.join(ENGINES)} or cufile")
        self._engine = ENGINES[engine]()
        self._files, self._sizes, self._digests = files, sizes, digests
        self.block_bytes = block_bytes
        self.step_bytes = max(1, _STEP_BYTES // block_bytes) * block_bytes
        self.skips = on_corrupt == "skip"
        self._good = {name: np.zeros(len(blocks), bool) for name, blocks in digests.items()}
        self._bad: dict[str, set[int]] = {}
        self._cached = files if isinstance(files, CachedFiles) else None
        self._handles: dict[str, Any] = {}
        self._replaced: list[Any] = []  # handles of damaged files: others may be reading from them
        self._passing: Counter[str] = Counter()  # opened for one read
        self._inodes: dict[str, int] = {}
        self._healed: set[tuple[str, int]] = set()
        self._renewals: Counter[str] = Counter()  # how often a file was brought again
        self._renewing = threading.Lock()
        self._seen = _Seen()
        self._scratch = Scratch()
        self._lock = threading.Lock()
        self.damage = Damage()

    @property
    def is_cached(self) -> bool:
        """Whether files are brought near when they are asked for."""
        return self._cached is not None

    @property
    def is_coming(self) -> bool:
        """Whether some of the files are still to be brought."""
        return self._cached is not None and self._cached.is_coming

    @property
    def is_short_of_room(self) -> bool:
        """Whether files that are brought near give way to others while they are still needed."""
        return self._cached is not None and not self._cached.open_files

    def read(self, name: str, start: int, out: Bytes) -> list[tuple[int, int]]:
        """Fill `out` with the bytes from `start` on; the stretches of it that are damaged (by policy)."""
        while True:
            self._seen.renewals = self._renewals[name]
            with suppress(_BroughtAgainError):
                return self._read(name, start, out)

    def _read(self, name: str, start: int, out: Bytes) -> list[tuple[int, int]]:
        with self._opened(name, start, start + len(out)) as handle:
            for begin, end, is_verified in self.steps(name, start, start + len(out)):
                part = out[begin - start : end - start]
                if is_verified:
                    if self._read_bytes(name, handle, begin, part):
                        continue
                    self.distrust(name, begin, end)  # what cannot be read any more is found bad below
                self._read_to_verify(name, handle, begin, part)
        return self._bad_parts(name, start, len(out)) if name in self._bad else []

    def stretches(self, name: str, start: int, stop: int) -> list[tuple[int, int, bool]]:
        """A stretch in up to three: from the first to the last block that is to be verified, and what is
        verified before and behind; and whether each is."""
        good = self._good[name][self._blocks(start, stop)]
        if good.all():
            return [(start, stop, True)]
        origin = start // self.block_bytes
        begin = max(start, (origin + int(good.argmin())) * self.block_bytes)
        end = min(stop, (origin + len(good) - int(good[::-1].argmin())) * self.block_bytes)
        parts = [(start, begin, True), (begin, end, False), (end, stop, True)]
        return [part for part in parts if part[0] < part[1]]

    def steps(self, name: str, start: int, stop: int) -> Iterator[tuple[int, int, bool]]:
        """The same, with blocks that are not verified yet a few at a time."""
        for begin, end, is_verified in self.stretches(name, start, stop):
            cuts = [] if is_verified else range(begin - begin % self.step_bytes, end, self.step_bytes)[1:]
            for part in itertools.pairwise((begin, *cuts, end)):
                yield *part, is_verified

    def read_blocks(
        self, name: str, start: int, stop: int, stage: Bytes
    ) -> tuple[list[tuple[int, int]], int]:
        """Read and verify the blocks around a stretch: what is damaged of it, and where it is staged."""
        begin, end = self._around(name, start, stop)
        while True:
            self._seen.renewals = self._renewals[name]
            with suppress(_BroughtAgainError):
                with self._opened(name, begin, end) as handle:
                    self._read_bytes(name, handle, begin, stage[: end - begin])
                self._judge(name, begin, stage[: end - begin])
                bad = self._bad_parts(name, start, stop - start) if name in self._bad else []
                return bad, start - begin

    def digests(self, name: str) -> npt.NDArray[np.uint64]:
        """Of every block of a file."""
        return self._digests[name]

    def trust(self, name: str, start: int, stop: int) -> None:
        """The blocks of a stretch have been verified elsewhere."""
        self._good[name][self._blocks(start, stop)] = True

    def distrust(self, name: str, start: int, stop: int) -> None:
        """Verify the blocks of a stretch anew."""
        self._good[name][self._blocks(start, stop)] = False

    def _blocks(self, start: int, stop: int) -> slice:
        return slice(start // self.block_bytes, -(-stop // self.block_bytes))

    def open(self, name: str, start: int, stop: int) -> _Opened:
        """The file for others to read a stretch from, where the engine's handles are open files."""
        opened = self._opened(name, start, stop)
        if opened.handle is None:
            raise FileNotFoundError(name)
        return opened

    def descriptor(self, name: str) -> int | None:
        """The open file, if it stays open until this reader is closed. One that may have to be fetched first
        is not waited for here."""
        if self._cached and name not in self._handles:
            return None
        try:
            opened = self._opened(name, 0, self._sizes[name])
        except StorageError:  # said by who reads it, when what was asked for before it has been handed out
            return None
        with opened as handle:
            return handle if name in self._handles else None

    def path(self, name: str) -> Path:
        return self._files.local_path(name)

    def _read_to_verify(self, name: str, handle: Any, start: int, part: Bytes) -> None:
        """Read a part of some blocks: these whole, in place where that can be, and judge them."""
        begin, end = self._around(name, start, start + len(part))
        in_place = len(part) == end - begin and self._engine.takes(part)
        whole = part if in_place else self._scratch.take(end - begin)
        self._read_bytes(name, handle, begin, whole)
        self._judge(name, begin, whole)
        if not in_place:  # what is handed on must be the very bytes that were verified
            part[:] = whole[start - begin :][: len(part)]

    def _around(self, name: str, start: int, stop: int) -> tuple[int, int]:
        """Where the blocks that a stretch lies in begin and end."""
        blocks = self._blocks(start, stop)
        return blocks.start * self.block_bytes, min(blocks.stop * self.block_bytes, self._sizes[name])

    def _judge(self, name: str, start: int, whole: Bytes) -> None:
        """Compare blocks with their digests."""
        for at in range(0, len(whole), self.block_bytes):
            block = (start + at) // self.block_bytes
            found = xxhash.xxh3_64_intdigest(whole[at : at + self.block_bytes].data)
            if found == int(self._digests[name][block]):
                self._good[name][block] = True
            else:
                self._bring_again(name, block, self._problem(name, block))
                self._mark_bad(name, block)

    def _read_bytes(self, name: str, handle: Any, start: int, out: Bytes) -> bool:
        """Whether it was read; where it was not, the buffer holds what it held before."""
        if handle is None:
            return False
        try:
            self._engine.read(handle, start, out)
            return True
        except EOFError:
            what = f"ends before byte {start + len(out):,}, its manifest says {self._sizes[name]:,}"
        except OSError as error:
            what = f"cannot be read at byte {start:,}: {error.strerror}"
        self._bring_again(name, start // self.block_bytes, f"{name} {what}")
        self._unreadable(name, what)
        return False

    def _bring_again(self, name: str, block: int, problem: str) -> None:
        """Have a damaged file brought again, where that is possible, and the read begin anew. Once for each
        block: what is damaged twice is so at its origin."""
        if self._cached is None:
            return
        with self._renewing:
            if self._renewals[name] > self._seen.renewals:  # another thread saw to it meanwhile
                raise _BroughtAgainError
            if (name, block) in self._healed:
                return
            self._healed.add((name, block))
            if self._refetched(name, problem):
                raise _BroughtAgainError

    def _refetched(self, name: str, problem: str) -> bool:
        assert self._cached
        try:
            self._cached.refetch(name, damaged=self._inodes.get(name, 0))
        except StokerError as error:
            if self.skips:
                return False
            raise BadShardError(
                f"{problem}, and cannot be brought again: {error.message}", hint=error.hint
            ) from error
        with self._lock:
            self.damage.healed.append(f"{problem}: brought again")
            if name in self._handles:
                self._replaced.append(self._handles.pop(name))
            self._renewals[name] += 1
        return True

    def _problem(self, name: str, block: int) -> str:
        at = block * self.block_bytes
        return f"{name}: block {block} (bytes {at:,} to {at + self.block_bytes:,}) differs from its digest"

    def _mark_bad(self, name: str, block: int) -> None:
        problem = self._problem(name, block)
        with self._lock:
            if block not in self._bad.setdefault(name, set()):
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
        size = self.block_bytes
        parts = ((b * size - start, (b + 1) * size - start) for b in sorted(self._bad[name]))
        return [(max(0, a), min(length, z)) for a, z in parts if a < length and z > 0]

    def cure(self, name: str) -> str:
        return (
            f"delete {self._files.local_path(name)} and stage or copy it again; `stoker prepare verify` "
            "lists all damage; on_corrupt='skip' trains on without it"
        )

    def _opened(self, name: str, start: int, stop: int) -> _Opened:
        with self._lock:
            if name in self._handles:
                return _Opened(self._engine, self._handles[name], keep=True)
            # before it is looked for: whoever ends a read of it meanwhile must not let go of it
            self._passing[name] += 1
        try:
            handle, is_whole = self._open_file(name, start, stop)
        except BaseException as error:
            self._release(name)
            if not isinstance(error, OSError):
                raise
            if self.skips:
                self._unreadable(name, str(error))
                return _Opened(self._engine, None, keep=True)
            raise StorageError(
                f"cannot open {self._files.local_path(name)}: {error.strerror}", hint=self._open_hint(error)
            ) from error
        with self._lock:
            most = self._cached.open_files if self._cached else _OPEN_FILES
            keep = is_whole and name not in self._handles and len(self._handles) < most
            if keep:
                self._handles[name] = handle
                self._passing[name] -= 1
        return _Opened(self._engine, handle, keep=keep, then=None if keep else partial(self._release, name))

    def _open_file(self, name: str, start: int, stop: int) -> tuple[Any, bool]:
        """The open file, and whether it is whole: one that is still landing is opened for one stretch."""
        if not self._cached:
            return self._engine.open(self._files.local_path(name)), True
        begin, end = self._around(name, start, stop)
        while True:
            path, is_whole = self._cached.within(name, begin, end)
            if is_whole and not path.exists():  # somebody tidied up
                self._cached.refetch(name, damaged=0)
            try:
                self._inodes[name] = path.stat().st_ino
                return self._engine.open(path), is_whole
            except FileNotFoundError:  # it has become whole meanwhile, or another goes on with it
                if is_whole:
                    raise

    def _release(self, name: str) -> None:
        """A read is over; when no other thread reads the file either, it may be evicted."""
        with self._lock:  # to the end: another thread may be about to open it
            self._passing[name] -= 1
            if self._cached and self._passing[name] <= 0 and name not in self._handles:
                self._cached.release(name)

    @staticmethod
    def _open_hint(error: OSError) -> str:
        if error.errno == 22:
            return "this filesystem has no O_DIRECT: use reader='pread'"
        return "check that the shard was staged, and its permissions"

    def close(self) -> None:
        """Close the files; safe twice."""
        with self._lock:
            handles, self._handles = self._handles, {}
            replaced, self._replaced = self._replaced, []
        for handle in (*handles.values(), *replaced):
            with suppress(OSError):
                self._engine.close(handle)
        for name in handles:
            self._release(name)


class _Seen(threading.local):
    """How often the file had been brought again when this thread began to read it."""

    renewals = 0


class _BroughtAgainError(Exception):
    """The file was replaced by a whole one: what was read of it does not count."""


class _Opened:
    """A handle for one read, closed after it unless it is kept."""

    def __init__(
        self, engine: Engine, handle: Any, *, keep: bool, then: Callable[[], None] | None = None
    ) -> None:
        self._engine, self.handle, self._keep, self._then = engine, handle, keep, then

    def __enter__(self) -> Any:
        return self.handle

    def __exit__(self, *exc: object) -> None:
        if not self._keep:
            self._engine.close(self.handle)
        if self._then:
            self._then()
