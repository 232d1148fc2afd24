"""Host chunk store: room for chunks in memory, and who reads them."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

from stoker.load.assembly.batch import Arena
from stoker.load.ordering.draw import Key
from stoker.load.parts import SPARE, Parts, slot_bytes
from stoker.load.pool import NativePool, Submitted, open_pool, runs_of
from stoker.load.reading.chunks import Chunk, ChunkCache, ChunkLoader, in_threads, room_for
from stoker.load.reading.engines import Bytes
from stoker.load.reading.layout import Windows


class Store:
    """The chunks of one epoch's layouts: an arena for windows, memory of their own for the rest. Grows
    when a group needs more chunks than there are slots."""

    def __init__(self, parts: Parts, *, batch_rows: int, threads: Executor | None, native: int = 0) -> None:
        self._threads, self._parts, self._native_readers = threads, parts, native
        self._pool: NativePool | None = None
        self._loaders = [
            ChunkLoader(layout, dataset.reader)
            for layout, dataset in zip(parts.layouts, parts.datasets, strict=True)
        ]
        self._slot_bytes = self._bytes_per_slot()
        self._fixed = isinstance(parts.layouts[0], Windows)
        self.arena: Arena | None = None
        self.cache = self._sized(2 * parts.group * batch_rows if parts.alone else parts.slots)

    @property
    def _most(self) -> int:
        """Slots that there is room for: an arena's memory is taken when it is first used."""
        return self._parts.slots + self._parts.in_flight - SPARE

    def for_keys(self, count: int) -> ChunkCache:
        if count > self.cache.slots:
            self.cache.drain()
            self.cache = self._sized(count + SPARE, samples_read=self.cache.samples_read)
        return self.cache

    def read_with(self, readers: int) -> None:
        """Let so many chunks be on their way at once, and so many threads in C read, where there are such;
        they are started when they are to work."""
        if not self._parts.alone:
            self.cache.resize(min(self._parts.slots - SPARE + readers, self._most))
        if self._pool is None and self._native_readers:
            blocks = max(loader.block_bytes for loader in self._loaders)
            self._pool = open_pool(threads=self._native_readers, block_bytes=blocks)
        if self._pool:
            self._pool.resize(readers)

    def close(self) -> None:
        """End what is still being read; safe twice."""
        if self._pool:
            self._pool.close()
            self._pool = None

    def current_arena(self) -> Arena:
        assert self.arena is not None
        return self.arena

    @property
    def bytes(self) -> int:
        return self.cache.slots * (self.arena.slot_bytes if self.arena else self._slot_bytes)

    def _bytes_per_slot(self) -> int:
        if self._parts.alone:
            return max(layout.chunk_bytes(1) for layout in self._parts.layouts if isinstance(layout, Windows))
        return max(slot_bytes(self._parts.layouts, self._parts.chunks))

    def _sized(self, slots: int, *, samples_read: int = 0) -> ChunkCache:
        room = slots if self._parts.alone else max(slots, self._most)
        arena = self.arena = Arena(room, self._slot_bytes) if self._fixed else None

        def load(key: Key, slot: int) -> Chunk:
            return self._loaders[key[0]].load(key, slot, arena.slot(slot) if arena else None)

        by_threads = in_threads(load, self._threads)

        def begin(key: Key, slot: int) -> Any:
            return self._submit(key, slot, arena.slot(slot) if arena else None) or by_threads(key, slot)

        return ChunkCache(begin, slots=slots, samples_read=samples_read)

    def _submit(self, key: Key, slot: int, room: Bytes | None) -> Submitted | None:
        """Let the threads in C read a chunk, if there are any and they can."""
        if self._pool is None:
            return None
        loader = self._loaders[key[0]]
        pieces = loader.pieces(key)
        if (runs := runs_of(self._pool, loader, pieces)) is None:
            return None
        lead, data = room_for(pieces, room)
        chunk = Chunk(slot=slot, data=data, pieces=pieces, damaged=(), lead=lead)

        def load_anew() -> Chunk:
            loader.distrust(pieces)
            return loader.load(key, slot, room)

        job = self._pool.submit(runs, target=data.ctypes.data)
        return Submitted(job, chunk, verified=lambda: loader.trust(pieces), load_anew=load_anew)
