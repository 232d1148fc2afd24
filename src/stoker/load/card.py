"""Windows of tokens made on a device.

The chunks themselves go to the device as they lie on disk, and batches are gathered and widened there: the
host touches each byte once, and 2 bytes a token travel instead of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch

from stoker.load.batch import Batch, WindowAssembler, by_dataset, places_of
from stoker.load.chunks import Chunk, ChunkCache, ChunkLoader
from stoker.load.cufile import Opened
from stoker.load.device import Device
from stoker.load.engines import Bytes
from stoker.load.layout import Piece, Windows
from stoker.load.order import Draw, Key
from stoker.load.plan import Task
from stoker.load.pump import Rings


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
        cufile: Opened,
    ) -> None:
        self._loaders, self.device, self._threads, self.cufile = loaders, device, threads, cufile
        self.slot_bytes = -(-slot_bytes // 64) * 64
        self._rings = Rings(device, max(loader.block_bytes for loader in loaders))
        self.cache = self._sized(slots)

    def for_keys(self, count: int) -> ChunkCache:
        if count > self.cache.slots:
            self.cache = self._sized(count + self.cache.slots // 4)
        return self.cache

    @property
    def bytes(self) -> int:
        return self.memory.numel()

    def gathered(self, slots: Sequence[int], event: Any) -> None:
        """Note that these slots are read until `event`: they must not be overwritten before."""
        for slot in slots:
            self._read_until[slot] = event

    def _sized(self, slots: int) -> ChunkCache:
        self.memory = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=self.device.torch_device)
        self.device.drain()  # whoever had this memory before may still be using it, on another stream
        self._read_until: list[Any] = [None] * slots
        memory, read_until = self.memory, self._read_until

        # a load asked of an earlier, smaller cache may still come: it must write into the memory it knew
        def load(key: Key, slot: int) -> Chunk:
            room = memory[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
            return self._load(key, slot, room, read_until[slot])

        return ChunkCache(load, slots=slots, threads=self._threads)

    def _load(self, key: Key, slot: int, room: torch.Tensor, read_until: Any) -> Chunk:
        loader = self._loaders[key[0]]
        pieces = loader.pieces(key)
        damaged: list[tuple[int, int]] = []
        with self.device.copying():
            self.device.wait_for(read_until)
            for piece in pieces:
                for part, is_verified in loader.parts(piece):
                    if not is_verified:
                        damaged += self._verify(loader, part, room)
                    elif not self._read_directly(loader, part, room, read_until):
                        loader.pump(part, self._rings.mine(), _room_of(part, room))
            ready = self.device.mark()
        return Chunk(slot=slot, data=_NOTHING, pieces=pieces, damaged=damaged, ready=ready)

    def _verify(self, loader: ChunkLoader, part: Piece, room: torch.Tensor) -> list[tuple[int, int]]:
        """A part of a block that is read for the first time: whole, and looked at before it goes on."""
        ring = self._rings.mine()
        damaged, start = loader.read_to_verify(part, ring.take())
        ring.push(start, part.stop - part.start, _room_of(part, room))
        return damaged

    def _read_directly(self, loader: ChunkLoader, part: Piece, room: torch.Tensor, read_until: Any) -> bool:
        """Through cuFile, once a first read through the host has verified the bytes."""
        direct = self.cufile.cufile
        if direct is None:
            return False
        if read_until is not None:
            read_until.synchronize()  # cuFile knows nothing of streams
        size = part.stop - part.start
        pointer = room.data_ptr() + part.at
        try:
            return direct.read(loader.path(part), offset=part.start, pointer=pointer, size=size) == size
        except OSError as error:  # this filesystem, or this driver, does not want to: read as everyone does
            self.cufile = Opened(cufile=None, reason=f"{error}: reading through the host")
            return False


_NOTHING: Bytes = np.empty(0, np.uint8)


def _room_of(part: Piece, room: torch.Tensor) -> torch.Tensor:
    return room[part.at : part.at + part.stop - part.start]


class DeviceWindows(WindowAssembler):
    """Windows gathered and widened on the device."""

    def __init__(self, layouts: Sequence[Windows], store: DeviceStore, **options: Any) -> None:
        super().__init__(layouts, _no_arena, **options)
        self._store = store
        self._torch_dtype = _torch_dtype(self._dtype)

    def _tokens(self, draw: Draw, held: Sequence[Chunk]) -> torch.Tensor:
        device = self._store.device
        with device.gathering():
            for chunk in held:
                device.wait_for(chunk.ready)
            parts = [
                (mine, self._on_device(self._layouts[which], part, held))
                for which, mine, part in by_dataset(draw)
            ]
            tokens = parts[0][1]
            if len(parts) > 1:
                tokens = torch.empty((len(draw), tokens.shape[1]), dtype=tokens.dtype, device=tokens.device)
                for mine, part in parts:
                    tokens[torch.from_numpy(mine).to(tokens.device)] = part
            self._store.gathered([chunk.slot for chunk in held], device.mark())
        return tokens

    def _on_device(self, layout: Windows, draw: Draw, held: Sequence[Chunk]) -> torch.Tensor:
        store, width = self._store, layout.seq_len + 1
        index = torch.from_numpy(places_of(layout, draw, held, store.slot_bytes))
        if store.device.is_cuda:
            index = index.pin_memory().to(store.device.torch_device, non_blocking=True)
        kind = _raw_dtype(layout.dtype)
        flat = store.memory.view(kind)
        windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
        # index_select, not windows[index]: it copies rows, ten times as fast as element by element
        wide = torch.index_select(windows, 0, index).to(self._torch_dtype)
        # torch has few kernels for uint16, so tokens travel as int16: give the high half its sign back
        return wide.bitwise_and_(0xFFFF) if layout.dtype == np.uint16 and kind == torch.int16 else wide

    def _batches(self, task: Task, draw: Draw, tokens: Any) -> list[Batch]:  # a tensor
        batches = super()._batches(task, draw, tokens)
        with self._store.device.gathering():
            return [self._moved(batch) for batch in batches]

    def _moved(self, batch: Batch) -> Batch:
        device = self._store.device.torch_device
        return {
            name: torch.from_numpy(value).to(device) if isinstance(value, np.ndarray) else value
            for name, value in batch.items()
        }


def _no_arena() -> Any:
    raise AssertionError("windows on a device have no arena on the host")


def _raw_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.int64 if dtype == np.uint16 else torch.from_numpy(np.empty(0, dtype)).dtype
