"""Chunk cache with read-ahead: the chunks in use, loaded by reading threads, held until others need the room.

One thread (the one that assembles batches) asks for chunks; reading threads fill them. Each chunk has a
slot, so that fixed-size chunks share one arena and a batch is gathered from it in one call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stoker.errors import BadShardError
from stoker.formats.zstd import SeekableReader
from stoker.load.ordering.draw import Key
from stoker.load.reading.engines import PAGE, Bytes
from stoker.load.reading.layout import Layout, Piece
from stoker.load.reading.plain import open_zstd
from stoker.load.reading.reader import ShardReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A loaded chunk: its bytes, where its pieces came from, and which stretches are damaged."""

    slot: int
    data: Bytes
    pieces: Sequence[Piece]
    damaged: Sequence[tuple[int, int]]
    ready: Any = None  # on a device: the event after which its bytes are there
    lead: int = 0  # bytes of its slot before it


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A stretch of an open file, and where it goes in its chunk. Blocks from `doubted` to `trusted` are to be
    verified; `digests` are those of all blocks of the file."""

    file: int
    start: int
    stop: int
    at: int
    digests: npt.NDArray[np.uint64]
    doubted: int
    trusted: int
    block_bytes: int
    file_bytes: int
    memory: int = 0  # its address, where it need not be read


class Pending(Protocol):
    """A chunk that will be there: a Future has both. Called from the thread that began it."""

    def result(self) -> Chunk: ...
    def exception(self) -> BaseException | None: ...


class Chunks(Protocol):
    """Who holds chunks for an assembler, as it asks for them."""

    @property
    def samples_read(self) -> int: ...
    def prefetch(self, keys: Iterable[Key], *, keep: Container[Key]) -> None: ...
    def hold(self, keys: Sequence[Key]) -> list[Chunk]: ...


class ChunkCache:
    """Holds up to `slots` chunks; the least recently used makes room. Used by one thread. `begin` starts
    loading a chunk into a slot; `samples_read` counts on where a smaller cache left off."""

    def __init__(
        self, begin: Callable[[Key, int], Chunk | Pending], *, slots: int, samples_read: int = 0
    ) -> None:
        self._begin = begin
        self._free = list(range(slots - 1, -1, -1))
        self._held: OrderedDict[Key, Chunk | _Loading] = OrderedDict()
        self._least = self._made = self.slots = slots
        self.samples_read = samples_read

    def resize(self, slots: int) -> None:
        """Hold up to so many, though never fewer than at the beginning; what is too much goes by and by."""
        self._free = [*range(slots - 1, self._made - 1, -1), *self._free]
        self._made, self.slots = max(slots, self._made), max(slots, self._least)

    def prefetch(self, keys: Iterable[Key], *, keep: Container[Key]) -> None:
        """Start loading what is missing, in this order, as far as there is room beside the chunks to keep."""
        for key in (key for key in keys if key not in self._held):
            if (slot := self._room(keep)) is None:
                return
            self.samples_read += key[2] - key[1]
            self._held[key] = self._started(key, slot)

    def hold(self, keys: Sequence[Key]) -> list[Chunk]:
        """These chunks, loaded; none of them makes room for another."""
        self.prefetch(keys, keep=set(keys))
        return [self._wait_for(key) for key in keys]

    def drain(self) -> None:
        """Wait for all that is being loaded: nobody writes into the slots any more."""
        for held in self._held.values():
            if isinstance(held, _Loading):
                held.pending.exception()

    def _started(self, key: Key, slot: int) -> Chunk | _Loading:
        try:
            begun = self._begin(key, slot)
        except BaseException:
            self._free.append(slot)
            raise
        return begun if isinstance(begun, Chunk) else _Loading(slot=slot, pending=begun)

    def _wait_for(self, key: Key) -> Chunk:
        held = self._held[key]
        if isinstance(held, Chunk):
            self._held.move_to_end(key)  # it is the latest used
            return held
        del self._held[key]
        try:
            chunk = self._held[key] = held.pending.result()
        except BaseException:
            self._free.append(held.slot)
            raise
        return chunk

    def _room(self, needed: Container[Key]) -> int | None:
        while len(self._held) > self.slots and (slot := self._given_up(needed)) is not None:
            self._free.append(slot)
        return self._free.pop() if len(self._held) < self.slots else self._given_up(needed)

    def _given_up(self, needed: Container[Key]) -> int | None:
        # a chunk still being read cannot be given away: prefer one that is not, or wait for it
        others = ((key, held) for key, held in self._held.items() if key not in needed)
        ready = (key for key, held in others if isinstance(held, Chunk))
        key = next(ready, None) or next((key for key in self._held if key not in needed), None)
        if key is None:
            return None
        held = self._held.pop(key)
        if isinstance(held, _Loading):
            held.pending.exception()
        return held.slot


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loading:
    """A chunk on its way."""

    slot: int
    pending: Pending


def in_threads(load: Callable[[Key, int], Chunk], threads: Executor | None) -> Callable[[Key, int], Any]:
    """How to begin loading a chunk: in a reading thread, or here and now."""
    return load if threads is None else lambda key, slot: threads.submit(load, key, slot)


def room_for(pieces: Sequence[Piece], room: Bytes | None) -> tuple[int, Bytes]:
    """Where a chunk goes in `room`, or memory of its own."""
    if room is not None:
        return (lead := lead_of(pieces)), room[lead:]
    end = max(piece.at + piece.stop - piece.start for piece in pieces)
    return 0, np.empty(-(-end // 8) * 8, np.uint8)


class ChunkLoader:
    """Reads the pieces of a chunk into a buffer. Called from reading threads."""

    def __init__(self, layout: Layout, reader: ShardReader) -> None:
        self._layout, self._reader = layout, reader

    def load(self, key: Key, slot: int, room: Bytes | None) -> Chunk:
        """Read a chunk into `room`, or into memory of its own."""
        pieces = self.pieces(key)
        lead, data = room_for(pieces, room)
        damaged: list[tuple[int, int]] = []
        for piece in pieces:
            damaged += self.read(piece, data[piece.at : piece.at + piece.stop - piece.start])
        return Chunk(slot=slot, data=data, pieces=pieces, damaged=damaged, lead=lead)

    def pieces(self, key: Key) -> list[Piece]:
        return self._layout.pieces(key[1], key[2])

    def read(self, piece: Piece, out: Bytes) -> list[tuple[int, int]]:
        """Read one piece; the stretches of the chunk that are damaged."""
        name = piece.file.name
        if piece.lost:
            return [(piece.at, piece.at + len(out))]
        if not _is_compressed(piece):
            parts = self._reader.read(name, piece.start, out)
            return [(piece.at + start, piece.at + stop) for start, stop in parts]
        try:
            return self._read_zstd(open_zstd(self._reader, name, piece.file.bytes), piece, out)
        except BadShardError:
            if not self._reader.skips:
                raise
            return [(piece.at, piece.at + len(out))]

    @property
    def block_bytes(self) -> int:
        return self._reader.block_bytes

    @property
    def step_bytes(self) -> int:
        """What `parts` that are not verified yet lie in, at most."""
        return self._reader.step_bytes

    def parts(self, piece: Piece) -> Iterator[tuple[Piece, bool]]:
        """A piece in parts: stretches of verified blocks, and some blocks at a time that are not yet."""
        for start, stop, is_verified in self._stretches(piece):
            yield replace(piece, start=start, stop=stop, at=piece.at + start - piece.start), is_verified

    def _stretches(self, piece: Piece) -> Iterator[tuple[int, int, bool]]:
        if not _is_compressed(piece):
            return self._reader.steps(piece.file.name, piece.start, piece.stop)
        # compressed bytes are verified as they are read, and are of no use to a device
        step = self._reader.step_bytes
        return ((at, min(at + step, piece.stop), False) for at in range(piece.start, piece.stop, step))

    def read_to_verify(self, part: Piece, stage: Bytes) -> tuple[list[tuple[int, int]], int]:
        """Read the blocks that a part lies in; what of the part's chunk is damaged, and where in the stage
        the part begins."""
        if _is_compressed(part):
            return self.read(part, stage[: part.stop - part.start]), 0
        damaged, lead = self._reader.read_blocks(part.file.name, part.start, part.stop, stage)
        return [(part.at + start, part.at + stop) for start, stop in damaged], lead

    def runs(self, pieces: Sequence[Piece]) -> list[Run] | None:
        """What to read for pieces whose files stay open, with the digests of what is not verified yet."""
        found: list[Run] = []
        for piece in pieces:
            name = piece.file.name
            file = None if piece.lost or _is_compressed(piece) else self._reader.descriptor(name)
            if file is None:
                return None
            doubted, trusted = self._doubted(piece)
            found.append(
                Run(
                    file=file,
                    start=piece.start,
                    stop=piece.stop,
                    at=piece.at,
                    digests=self._reader.digests(name),
                    doubted=doubted,
                    trusted=trusted,
                    block_bytes=self.block_bytes,
                    file_bytes=piece.file.bytes,
                )
            )
        return found

    def _doubted(self, piece: Piece) -> tuple[int, int]:
        """From the first block that has to be verified to behind the last; (0, 0): none."""
        stretches = self._reader.stretches(piece.file.name, piece.start, piece.stop)
        doubted = [(start, stop) for start, stop, is_verified in stretches if not is_verified]
        return (doubted[0][0] // self.block_bytes * self.block_bytes, doubted[-1][1]) if doubted else (0, 0)

    def trust(self, pieces: Sequence[Piece]) -> None:
        """All blocks that these lie in have been verified."""
        for piece in pieces:
            self._reader.trust(piece.file.name, piece.start, piece.stop)

    def distrust(self, pieces: Sequence[Piece]) -> None:
        """Verify these anew: something has changed."""
        for piece in pieces:
            self._reader.distrust(piece.file.name, piece.start, piece.stop)

    def open(self, part: Piece) -> AbstractContextManager[int]:
        return self._reader.open(part.file.name, part.start, part.stop)

    def path(self, part: Piece) -> Path:
        return self._reader.path(part.file.name)

    def _read_zstd(self, plain: SeekableReader, piece: Piece, out: Bytes) -> list[tuple[int, int]]:
        plain.seek(piece.start)
        view: Any = out.data
        while len(view) and (got := plain.readinto(view)):
            view = view[got:]
        if len(view):
            raise BadShardError(
                f"{piece.file.name} ends at byte {plain.size:,}, byte {piece.stop:,} of it is asked for",
                hint=self._reader.cure(piece.file.name),
            )
        return []


def lead_of(pieces: Sequence[Piece]) -> int:
    """Where in its slot a chunk begins: as far into a page as in its file, so that O_DIRECT can read most of
    it in place."""
    return pieces[0].start % PAGE


def _is_compressed(piece: Piece) -> bool:
    return piece.file.name.endswith(".zst")
