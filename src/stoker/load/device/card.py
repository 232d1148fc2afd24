"""On-device gather: windows of tokens made on a device.

The chunks themselves go to the device as they lie on disk, and batches are gathered and widened there: the
host touches each byte once, and 2 bytes a token travel instead of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import numpy as np
import torch

from stoker.load.assembly.batch import IGNORED, WindowAssembler, by_dataset, places_of
from stoker.load.assembly.rows import Batch
from stoker.load.device.pinned import PageCache
from stoker.load.device.pump import Rings
from stoker.load.device.streams import Device
from stoker.load.ordering.draw import Draw, Key
from stoker.load.ordering.plan import Task
from stoker.load.pool import NativePool, Submitted, runs_of
from stoker.load.reading.chunks import Chunk, ChunkCache, ChunkLoader, in_threads
from stoker.load.reading.cufile import Opened
from stoker.load.reading.engines import Bytes
from stoker.load.reading.layout import Piece, Windows
from stoker.mixing import Integers


class DeviceStore:
    """Chunks on a device. Grows when a group needs more chunks than there are slots."""

    def __init__(
        self,
        loaders: Sequence[ChunkLoader],
        device: Device,
        *,
        slots: int,
        slot_bytes: int,
        threads: Executor | None,
        pool: NativePool | None,
        page_cache: PageCache | None,
        cufile: Opened,
    ) -> None:
        self._loaders, self.device, self._threads, self.cufile = loaders, device, threads, cufile
        self._pool, self._page_cache = pool, page_cache
        self.slot_bytes = -(-slot_bytes // 64) * 64
        self._rings = Rings(device, max(loader.step_bytes for loader in loaders))
        self.cache = self._sized(slots)

    def for_keys(self, count: int) -> ChunkCache:
        if count > self.cache.slots:
            self.cache.drain()
            self.cache = self._sized(count + self.cache.slots // 4, samples_read=self.cache.samples_read)
        return self.cache

    @property
    def bytes(self) -> int:
        return self.memory.numel()

    def reader(self) -> str:
        """How bytes are read."""
        if self._page_cache is None:
            return self.cufile.reason
        if self._page_cache.refused:
            return f"{self._page_cache.refused}: reading with pread"
        return f"mmap: the card copies {self._page_cache.bytes >> 20:,} MiB of the page cache by itself"

    def close(self) -> None:
        """End what is still being read; safe twice."""
        if self._pool:
            self._pool.close()
        if self._page_cache:
            self.device.drain()  # copies from there may still be running
            self._page_cache.close()
        if self.cufile.cufile:
            self.cufile.cufile.close()

    def await_chunks(self, chunks: Sequence[Chunk]) -> None:
        """Let the current stream wait for chunks it has not waited for yet."""
        new = [chunk for chunk in chunks if self._arrived[chunk.slot] is not chunk]
        self.device.wait_for(*(chunk.ready for chunk in new))
        for chunk in new:
            self._arrived[chunk.slot] = chunk

    def gathered(self, chunks: Sequence[Chunk], event: Any) -> None:
        """Note that these are read until `event`: their slots must not be overwritten before."""
        for chunk in chunks:
            self._read_until[chunk.slot] = event

    def _sized(self, slots: int, *, samples_read: int = 0) -> ChunkCache:
        self.memory = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=self.device.torch_device)
        self.device.drain()  # whoever had this memory before may still be using it, on another stream
        self._read_until: list[Any] = [None] * slots
        self._arrived: list[Chunk | None] = [None] * slots
        memory, read_until, address = self.memory, self._read_until, self.memory.data_ptr()

        # a load asked of an earlier, smaller cache may still come: it must write into the memory it knew
        def place(slot: int) -> _Place:
            begin = slot * self.slot_bytes
            return _Place(slot, memory, begin, begin + self.slot_bytes, address + begin, read_until[slot])

        by_threads = in_threads(lambda key, slot: self._load(key, place(slot)), self._threads)

        def begin(key: Key, slot: int) -> Any:
            return (self._pool and self._submit(key, place(slot))) or by_threads(key, slot)

        return ChunkCache(begin, slots=slots, samples_read=samples_read)

    def _submit(self, key: Key, place: _Place) -> Submitted | None:
        """Let the pool read a chunk, if it can verify what has not been verified before."""
        assert self._pool is not None
        loader = self._loaders[key[0]]
        pieces = loader.pieces(key)
        if (runs := runs_of(self._pool, loader, pieces)) is None:
            return None
        if self._page_cache:
            runs = [part for run in runs for part in self._page_cache.located(run)]
        job = self._pool.submit(runs, target=place.address, after=place.read_until)
        chunk = Chunk(slot=place.slot, data=_NOTHING, pieces=pieces, damaged=(), ready=job)
        return Submitted(
            job, chunk, verified=lambda: loader.trust(pieces), load_anew=lambda: self._load_anew(key, place)
        )

    def _load(self, key: Key, place: _Place) -> Chunk:
        try:
            return self._load_parts(key, place)
        except (EOFError, OSError):
            return self._load_anew(key, place)

    def _load_anew(self, key: Key, place: _Place) -> Chunk:
        """A file that was good cannot be read any more: look again, and raise or skip what is wrong."""
        loader = self._loaders[key[0]]
        loader.distrust(loader.pieces(key))
        return self._load_parts(key, place)

    def _load_parts(self, key: Key, place: _Place) -> Chunk:
        loader = self._loaders[key[0]]
        pieces = loader.pieces(key)
        damaged: list[tuple[int, int]] = []
        with self.device.copying():
            self.device.wait_for(place.read_until)
            for part, is_verified in (part for piece in pieces for part in loader.parts(piece)):
                room = place.room[part.at : part.at + part.stop - part.start]
                if not is_verified:
                    damaged += self._verify(loader, part, room)
                elif not self._read_directly(loader, part, room, place.read_until):
                    with loader.open(part) as file:
                        self._rings.mine().pump(file, part.start, room)
            ready = self.device.mark()
        return Chunk(slot=place.slot, data=_NOTHING, pieces=pieces, damaged=damaged, ready=ready)

    def _verify(self, loader: ChunkLoader, part: Piece, room: torch.Tensor) -> list[tuple[int, int]]:
        """A part of blocks that are read for the first time: whole, and looked at before they go on."""
        ring = self._rings.mine()
        damaged, start = loader.read_to_verify(part, ring.take())
        ring.push(start, len(room), room)
        return damaged

    def _read_directly(self, loader: ChunkLoader, part: Piece, room: torch.Tensor, read_until: Any) -> bool:
        """Through cuFile, once a first read through the host has verified the bytes."""
        direct = self.cufile.cufile
        if direct is None:
            return False
        if read_until is not None:
            read_until.synchronize()  # cuFile knows nothing of streams
        path, size = loader.path(part), len(room)
        try:
            return direct.read(path, offset=part.start, pointer=room.data_ptr(), size=size) == size
        except OSError as error:  # this filesystem, or this driver, does not want to: read as everyone does
            self.cufile = Opened(cufile=None, reason=f"{error}: reading through the host")
            return False


_NOTHING: Bytes = np.empty(0, np.uint8)


class _Place(NamedTuple):
    """Where a chunk goes, and the event until which what was there is still being read."""

    slot: int
    memory: torch.Tensor
    begin: int
    end: int
    address: int
    read_until: Any

    @property
    def room(self) -> torch.Tensor:
        return self.memory[self.begin : self.end]


class DeviceWindows(WindowAssembler):
    """Windows gathered and widened on the device."""

    def __init__(self, layouts: Sequence[Windows], store: DeviceStore, **options: Any) -> None:
        super().__init__(layouts, _no_arena, wrap=store.device.moved, **options)
        self._store = store
        self._torch_dtype = _torch_dtype(self._dtype)

    def assemble(self, task: Task, held: Sequence[Chunk]) -> Sequence[Batch]:
        with self._store.device.gathering():
            return super().assemble(task, held)

    def _tokens(self, draw: Draw, held: Sequence[Chunk]) -> torch.Tensor:
        self._store.await_chunks(held)
        parts = [
            (mine, self._on_device(self._layouts[which], part, held))
            for which, mine, part in by_dataset(draw)
        ]
        tokens = parts[0][1]
        if len(parts) > 1:
            tokens = torch.empty((len(draw), tokens.shape[1]), dtype=tokens.dtype, device=tokens.device)
            for mine, part in parts:
                tokens[torch.from_numpy(mine).to(tokens.device)] = part
        self._store.gathered(held, self._store.device.mark())
        return tokens

    def _ignored(self, labels: torch.Tensor, where: tuple[Integers, Integers]) -> torch.Tensor:
        ignored = np.zeros(tuple(labels.shape), bool)
        ignored[where] = True
        return labels.long().masked_fill(self._wrap(ignored), IGNORED)

    def _on_device(self, layout: Windows, draw: Draw, held: Sequence[Chunk]) -> torch.Tensor:
        store, width = self._store, layout.seq_len + 1
        index = store.device.sent(places_of(layout, draw, held, store.slot_bytes))
        flat = store.memory.view(_raw_dtype(layout.dtype))
        windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
        # index_select, not windows[index]: it copies rows, ten times as fast as element by element
        rows = torch.index_select(windows, 0, index)
        # torch has few kernels for uint16, but one to widen it
        return (rows.view(torch.uint16) if layout.dtype == np.uint16 else rows).to(self._torch_dtype)


def _no_arena() -> Any:
    raise AssertionError("windows on a device have no arena on the host")


def _raw_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.int64 if dtype == np.uint16 else torch.from_numpy(np.empty(0, dtype)).dtype
