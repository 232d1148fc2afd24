"""Batches on a device. The one home of torch in the load stage.

For windows of tokens the chunks themselves go to the device, through small pinned buffers and a copy
stream, and batches are gathered and widened there: the host touches each byte once, and a card moves
2 bytes a token instead of 8. Everything else is made on the host and copied batch by batch.

A CPU device runs the same code; its streams and events do nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from stoker.errors import UsageError
from stoker.load.batch import Batch, WindowAssembler
from stoker.load.chunks import Chunk, ChunkCache, ChunkLoader, Key
from stoker.load.cufile import Opened
from stoker.load.engines import Bytes
from stoker.load.layout import Piece, Windows
from stoker.load.order import Draw, Integers

# Read and copied at once: what was read is still in the processor's cache when the card fetches it
# (48.8 GB/s with 4 MiB, 41 GB/s with 16 MiB on the H200 machine).
_STEP_BYTES = 4 << 20

_STAGES = 2  # pinned buffers per reading thread: one is filled while the other is copied


def as_tensors(batch: Batch) -> Batch:
    """The arrays of a batch as tensors over the same memory."""
    if isinstance(batch, dict):
        return {name: _tensor(value) for name, value in batch.items()}
    made: Batch = _tensor(batch)
    return made


def _tensor(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return torch.from_numpy(value)
    if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) for one in value):
        same = all(one.shape == value[0].shape for one in value)
        return torch.stack(value) if same else value
    return value


class Device:
    """A device and its side streams."""

    def __init__(self, name: str) -> None:
        try:
            self.torch_device = torch.device(name)
        except RuntimeError as error:
            raise UsageError(
                f"device={name!r} is unknown: {error}", hint="use 'cuda', 'cuda:0' or 'cpu'"
            ) from None
        self.is_cuda = self.torch_device.type == "cuda"
        if self.is_cuda and not torch.cuda.is_available():
            raise UsageError(
                "this machine has no CUDA device", hint="use device='cpu', or check `nvidia-smi`"
            )
        if self.is_cuda and self.torch_device.index is None:
            self.torch_device = torch.device("cuda", torch.cuda.current_device())
        stream: Any = torch.cuda.Stream  # untyped in torch
        self._copying = stream(self.torch_device) if self.is_cuda else None
        self._gathering = stream(self.torch_device) if self.is_cuda else None

    def copying(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._copying) if self._copying else nullcontext()

    def gathering(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._gathering) if self._gathering else nullcontext()

    def mark(self) -> Any:
        """An event of the current stream, here and now; None where there are no streams."""
        return torch.cuda.current_stream(self.torch_device).record_event() if self.is_cuda else None

    def wait_for(self, event: Any) -> None:
        """Let the current stream, not this thread, wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self.torch_device).wait_event(event)

    def drain(self) -> None:
        """Wait until everything asked of the device is done."""
        if self.is_cuda:
            torch.cuda.synchronize(self.torch_device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self.is_cuda)


class _Stages(threading.local):
    """A few pinned buffers per reading thread, each with the event after which it may be filled again."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._buffers: deque[tuple[torch.Tensor, Any]] = deque()

    def take(self) -> torch.Tensor:
        if len(self._buffers) < _STAGES:
            return self._device.pinned(_STEP_BYTES)
        buffer, copied = self._buffers.popleft()
        if copied is not None:
            copied.synchronize()  # the copy may still be running
        return buffer

    def give_back(self, buffer: torch.Tensor, copied: Any) -> None:
        self._buffers.append((buffer, copied))


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
        self._stages = _Stages(device)
        self.cache = self._sized(slots)

    def for_keys(self, count: int) -> ChunkCache:
        if count > self.cache.slots:
            self.device.drain()  # the old memory may still be written and read
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
            for step in (step for piece in pieces for step in _steps(piece)):
                if not self._read_directly(loader, step, room, read_until):
                    damaged += self._stage(loader, step, room)
            ready = self.device.mark()
        return Chunk(slot=slot, data=_NOTHING, pieces=pieces, damaged=damaged, ready=ready)

    def _read_directly(self, loader: ChunkLoader, piece: Piece, room: torch.Tensor, read_until: Any) -> bool:
        """Through cuFile, once a first read through the host has verified the bytes."""
        direct = self.cufile.cufile
        path = loader.path_if_verified(piece) if direct else None
        if path is None or direct is None:
            return False
        if read_until is not None:
            read_until.synchronize()  # cuFile knows nothing of streams
        size = piece.stop - piece.start
        pointer = room.data_ptr() + piece.at
        try:
            return direct.read(path, offset=piece.start, pointer=pointer, size=size) == size
        except OSError as error:  # this filesystem, or this driver, does not want to: read as everyone does
            self.cufile = Opened(cufile=None, reason=f"{error}: reading through the host")
            return False

    def _stage(self, loader: ChunkLoader, piece: Piece, room: torch.Tensor) -> list[tuple[int, int]]:
        stage, size = self._stages.take(), piece.stop - piece.start
        damaged = loader.read(piece, stage[:size].numpy())
        room[piece.at : piece.at + size].copy_(stage[:size], non_blocking=True)
        self._stages.give_back(stage, self.device.mark())
        return damaged


_NOTHING: Bytes = np.empty(0, np.uint8)


def _steps(piece: Piece) -> Iterator[Piece]:
    """A piece in steps that end where blocks of digests do: such a block is verified as it is read."""
    start = piece.start
    while start < piece.stop:
        stop = min(start - start % _STEP_BYTES + _STEP_BYTES, piece.stop)
        yield replace(piece, start=start, stop=stop, at=piece.at + start - piece.start)
        start = stop


class DeviceWindows(WindowAssembler):
    """Windows gathered and widened on the device."""

    def __init__(self, layouts: Sequence[Windows], store: DeviceStore, **options: Any) -> None:
        super().__init__(layouts, _no_arena, **options)
        self._store = store
        self._torch_dtype = _torch_dtype(self._dtype)

    def _tokens(self, draw: Draw, held: Sequence[Chunk], chunk_of: Integers, rows: Integers) -> torch.Tensor:
        device = self._store.device
        slots = np.array([chunk.slot for chunk in held])[chunk_of]
        width = self._layouts[0].seq_len + 1
        with device.gathering():
            for chunk in held:
                device.wait_for(chunk.ready)
            tokens = torch.empty((len(rows), width), dtype=self._torch_dtype, device=device.torch_device)
            for which in np.unique(draw.dataset).tolist():
                mine = np.flatnonzero(draw.dataset[rows] == which)
                part = self._on_device(which, draw, slots, rows[mine], width)
                if len(mine) == len(rows):
                    tokens = part
                else:
                    tokens[torch.from_numpy(mine).to(device.torch_device)] = part
            self._store.gathered([chunk.slot for chunk in held], device.mark())
        return tokens

    def _on_device(self, which: int, draw: Draw, slots: Integers, rows: Integers, width: int) -> torch.Tensor:
        layout, store = self._layouts[which], self._store
        kind = _raw_dtype(layout.dtype)
        places = slots[rows] * (store.slot_bytes // layout.dtype.itemsize)
        places += layout.token_in_chunk(draw.sample[rows], draw.first[rows])
        index = torch.from_numpy(places)
        if store.device.is_cuda:
            index = index.pin_memory().to(store.device.torch_device, non_blocking=True)
        flat = store.memory.view(kind)
        windows = flat.as_strided((flat.numel() - width + 1, width), (1, 1))
        # index_select, not windows[index]: it copies rows, ten times as fast as element by element
        wide = torch.index_select(windows, 0, index).to(self._torch_dtype)
        # torch has few kernels for uint16, so tokens travel as int16: give the high half its sign back
        return wide.bitwise_and_(0xFFFF) if layout.dtype == np.uint16 and kind == torch.int16 else wide

    def _batches(self, task: Any, tokens: Any, rows: Integers) -> list[Batch]:
        batches = super()._batches(task, tokens, rows)
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


class Arrivals:
    """Hands batches made on side streams over to the consumer's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def made(self) -> Any:
        """Called by the thread that made a group: the event after which it is there."""
        with self._device.gathering():
            return self._device.mark()

    def accept(self, batches: Sequence[Batch], ready: Any) -> None:
        """Called by the consumer: its stream waits for the group, not its thread."""
        if ready is None:
            return
        self._device.wait_for(ready)
        stream = torch.cuda.current_stream(self._device.torch_device)
        for batch in batches:
            for value in batch.values() if isinstance(batch, dict) else ():
                if isinstance(value, torch.Tensor) and value.is_cuda:
                    value.record_stream(stream)  # or its memory could be reused under the consumer's kernels


class Copier:
    """Host batches to a device through pinned buffers, ahead of the consumer."""

    def __init__(self, device: Device, *, ahead: int = 2) -> None:
        self._device, self._ahead = device, ahead
        self._stages: deque[tuple[torch.Tensor, Any]] = deque()

    def copied(self, batches: Iterator[Batch], *, given: Callable[[], Any]) -> Iterator[tuple[Batch, Any]]:
        """Each batch on the device, with what `given` said when it left the host."""
        waiting: deque[tuple[Batch, Any, Any]] = deque()
        for batch in batches:
            waiting.append((*self._copy(batch), given()))
            if len(waiting) > self._ahead:
                yield self._arrived(waiting.popleft())
        while waiting:
            yield self._arrived(waiting.popleft())

    def _arrived(self, one: tuple[Batch, Any, Any]) -> tuple[Batch, Any]:
        batch, ready, state = one
        Arrivals(self._device).accept([batch], ready)
        return batch, state

    def _copy(self, batch: Batch) -> tuple[Batch, Any]:
        if not isinstance(batch, dict) or not self._device.is_cuda:
            return batch, None
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        stage = self._stage(sum(-(-t.nbytes // 16) * 16 for t in tensors.values()))
        moved, at = dict(batch), 0
        with self._device.copying():
            for name, tensor in tensors.items():
                pinned = stage[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                pinned.copy_(tensor)
                moved[name] = pinned.to(self._device.torch_device, non_blocking=True)
                at += -(-tensor.nbytes // 16) * 16
            ready = self._device.mark()
        self._stages.append((stage, ready))
        return moved, ready

    def _stage(self, size: int) -> torch.Tensor:
        if len(self._stages) > self._ahead:
            stage, copied = self._stages.popleft()
            copied.synchronize()  # the copy may still be running
            if stage.numel() >= size:
                return stage
        return self._device.pinned(size)
