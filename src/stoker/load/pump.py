"""Stretches of files to a device, through a ring of pinned stages per reading thread.

A stage is filled, its copy asked for, and it is filled again only once that copy is done: reading, copying
and computing run at the same time. `NativeRing` does it in C where the small extension was built;
`TorchRing` is its twin, and serves the CPU too, where a copy is just a copy.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import torch

from stoker.load.engines import PAGE, Bytes, Pread

if TYPE_CHECKING:
    from stoker.load.device import Device

# Read and copied at once: what was read is still in the processor's cache when the card fetches it, and
# each copy costs the driver some 3 us (H200, 14 threads: 41 GB/s with 512 KiB, 47 with 1 MiB, 50 with
# 2 MiB, 53 with 4 MiB).
STEP_BYTES = 4 << 20

_STAGES = 2  # one is filled while the other is copied


class Ring(Protocol):
    """Stages of one thread. A target is a stretch of device memory; copies run on the copy stream."""

    step: int

    def take(self) -> Bytes:
        """A stage that may be filled."""

    def push(self, start: int, size: int, target: torch.Tensor) -> None:
        """Copy part of the stage taken last."""

    def pump(self, file: int, offset: int, target: torch.Tensor) -> None:
        """Read from an open file to the target; EOFError where it is too short."""


class TorchRing:
    """In Python: for the CPU, and where the extension was not built."""

    def __init__(self, device: Device, step: int) -> None:
        self._device, self.step = device, step
        self._stages = [device.pinned(step) for _ in range(_STAGES)]
        self._copied: list[Any] = [None] * _STAGES
        self._now = 0

    def take(self) -> Bytes:
        self._now = (self._now + 1) % _STAGES
        if self._copied[self._now] is not None:
            self._copied[self._now].synchronize()  # the copy may still be running
        stage: Bytes = self._stages[self._now].numpy()
        return stage

    def push(self, start: int, size: int, target: torch.Tensor) -> None:
        target.copy_(self._stages[self._now][start : start + size], non_blocking=True)
        self._copied[self._now] = self._device.mark()

    def pump(self, file: int, offset: int, target: torch.Tensor) -> None:
        done = 0
        while done < target.numel():
            lead = (offset + done) % PAGE  # the file may be open for O_DIRECT: read from whole pages on
            here = min(self.step - (offset + done) % self.step, target.numel() - done)
            stage = self.take()[: -(-(lead + here) // PAGE) * PAGE]
            Pread().read_at_least(file, offset + done - lead, stage, lead + here)
            self.push(lead, here, target[done : done + here])
            done += here


class NativeRing:
    """In C, without Python's lock."""

    def __init__(self, native: Any, device: Device, step: int) -> None:
        self._native, self.step = native, step
        self._memory = device.pinned(step * _STAGES)
        self._stages = self._memory.numpy().reshape(_STAGES, step)
        self._ring = native.make_ring(device.torch_device.index, self._memory.data_ptr(), step, _STAGES)
        self._stream = device.copy_stream
        self._now = 0

    def __del__(self) -> None:
        self._ring = None  # waits for its copies, before the memory they read from goes

    def take(self) -> Bytes:
        self._now = self._native.take(self._ring)
        stage: Bytes = self._stages[self._now]
        return stage

    def push(self, start: int, size: int, target: torch.Tensor) -> None:
        self._native.push(self._ring, self._now, start, size, target.data_ptr(), self._stream)

    def pump(self, file: int, offset: int, target: torch.Tensor) -> None:
        self._native.pump(self._ring, file, offset, target.numel(), target.data_ptr(), self._stream)


class Rings(threading.local):
    """A ring per reading thread, of stages that hold a block of digests."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        self._device, self._step = device, max(STEP_BYTES, -(-block_bytes // PAGE) * PAGE)
        self._ring: Ring | None = None

    def mine(self) -> Ring:
        if self._ring is None:
            self._ring = make_ring(self._device, self._step)
        return self._ring


def make_ring(device: Device, step: int) -> Ring:
    if device.is_cuda:
        with suppress(ImportError, OSError):
            return NativeRing(import_module("stoker.load._pump"), device, step)
    return TorchRing(device, step)
