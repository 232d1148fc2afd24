"""The chunks in use: loaded by reading threads, held until others need the room.

One thread (the one that assembles batches) asks for chunks; reading threads fill them. Each chunk has a
slot, so that fixed-size chunks share one arena and a batch is gathered from it in one call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import BadShardError
from stoker.formats.zstd import SeekableReader
from stoker.load.engines import Bytes
from stoker.load.layout import Layout, Piece
from stoker.load.reader import ShardReader, open_zstd

Key = tuple[int, int, int]  # dataset, first sample, stop


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A loaded chunk: its bytes, where its pieces came from, and which stretches are damaged."""

    slot: int
    data: Bytes
    pieces: Sequence[Piece]
    damaged: Sequence[tuple[int, int]]
    ready: Any = None  # on a device: the event after which its bytes are there


class ChunkCache:
    """Holds up to `slots` chunks; the least recently used makes room. Used by one thread."""

    def __init__(
        self, load: Callable[[Key, int], Chunk], *, slots: int, threads: Executor | None = None
    ) -> None:
        self._load, self._threads = load, threads
        self._free = list(range(slots - 1, -1, -1))
        self._held: OrderedDict[Key, Chunk | _Loading] = OrderedDict()
        self.slots = slots
        self.loads = 0

    def prefetch(self, keys: Sequence[Key], *, keep: set[Key]) -> None:
        """Start loading what is missing, as far as there is room beside the chunks to keep."""
        for key in (key for key in keys if key not in self._held):
            if (slot := self._room(keep)) is None:
                return
            self.loads += 1
            if self._threads is None:
                self._held[key] = self._load_here(key, slot)
            else:
                self._held[key] = _Loading(slot=slot, future=self._threads.submit(self._load, key, slot))

    def hold(self, keys: Sequence[Key]) -> list[Chunk]:
        """These chunks, loaded; none of them makes room for another."""
        self.prefetch(keys, keep=set(keys))
        return [self._wait_for(key) for key in keys]

    def _load_here(self, key: Key, slot: int) -> Chunk:
        try:
            return self._load(key, slot)
        except BaseException:
            self._free.append(slot)
            raise

    def _wait_for(self, key: Key) -> Chunk:
        held = self._held.pop(key)  # and put back at the end: it is the latest used
        if isinstance(held, _Loading):
            try:
                held = held.future.result()
            except BaseException:
                self._free.append(held.slot)
                raise
        self._held[key] = held
        return held

    def _room(self, needed: set[Key]) -> int | None:
        if self._free:
            return self._free.pop()
        others = [key for key in self._held if key not in needed]
        if not others:
            return None
        # a chunk still being read cannot be given away: prefer one that is not, or wait for it
        ready = (key for key in others if isinstance(self._held[key], Chunk))
        held = self._held.pop(next(ready, others[0]))
        if isinstance(held, _Loading):
            held.future.exception()
        return held.slot


@dataclass(frozen=True, kw_only=True, slots=True)
class _Loading:
    """A chunk on its way."""

    slot: int
    future: Future[Chunk]


class ChunkLoader:
    """Reads the pieces of a chunk into a buffer. Called from reading threads."""

    def __init__(self, layout: Layout, reader: ShardReader) -> None:
        self._layout, self._reader = layout, reader

    def load(self, key: Key, slot: int, room: Bytes | None) -> Chunk:
        """Read a chunk into `room`, or into memory of its own."""
        pieces = self.pieces(key)
        end = max(piece.at + piece.stop - piece.start for piece in pieces)
        data = np.empty(-(-end // 8) * 8, np.uint8) if room is None else room
        damaged: list[tuple[int, int]] = []
        for piece in pieces:
            damaged += self.read(piece, data[piece.at : piece.at + piece.stop - piece.start])
        return Chunk(slot=slot, data=data, pieces=pieces, damaged=damaged)

    def pieces(self, key: Key) -> list[Piece]:
        return self._layout.pieces(key[1], key[2])

    def read(self, piece: Piece, out: Bytes) -> list[tuple[int, int]]:
        """Read one piece; the stretches of the chunk that are damaged."""
        name = piece.file.name
        if not name.endswith(".zst"):
            parts = self._reader.read(name, piece.start, out)
            return [(piece.at + start, piece.at + stop) for start, stop in parts]
        try:
            return self._read_zstd(open_zstd(self._reader, name, piece.file.bytes), piece, out)
        except BadShardError:
            if not self._reader.skips:
                raise
            return [(piece.at, piece.at + len(out))]

    def path_if_verified(self, piece: Piece) -> Path | None:
        """Where a piece can be read from without verifying it again, by any means."""
        if piece.file.name.endswith(".zst"):
            return None
        return self._reader.path_if_verified(piece.file.name, piece.start, piece.stop)

    def _read_zstd(self, plain: SeekableReader, piece: Piece, out: Bytes) -> list[tuple[int, int]]:
        plain.seek(piece.start)
        view: Any = out.data
        while len(view) and (got := plain.readinto(view)):
            view = view[got:]
        return []
