"""Stretches of files to a device, through pinned stages.

A stage is filled, its copy asked for, and it is filled again only once that copy is done: reading, copying
and computing run at the same time. `NativePool` does it with threads in C, where the small extension was
built; `TorchRing` is its twin for a Python thread. It serves the CPU too, where a copy is just a copy.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch

from stoker.load.device import Device
from stoker.reading.chunks import Run
from stoker.reading.engines import PAGE, Bytes, Pread

# Read and copied at once: what was read is still in the processor's cache when the card fetches it, and
# each copy costs the driver some 3 us (H200, 14 threads: 41 GB/s with 512 KiB, 47 with 1 MiB, 50 with
# 2 MiB, 53 with 4 MiB).
STEP_BYTES = 4 << 20

_STAGES = 2  # one is filled while the other is copied


class NativeJob:
    """Stretches being read by the pool."""

    def __init__(self, native: Any, job: Any, *needed: Any) -> None:
        self._native, self._job = native, job
        self._needed = needed  # an event and digests must not go while they may still be looked at

    def finish(self) -> None:
        """Wait until all copies have been asked for. EOFError or OSError if a file could not be read,
        ValueError if a block differs from its digest."""
        self._native.finish(self._job)

    def wait(self, stream: Any) -> None:
        """Let a stream wait for the copies of a finished job, as torch's events do."""
        self._native.wait(self._job, stream.cuda_stream)


class NativePool:
    """Reading threads in C. Jobs are submitted by one thread; `close` is safe twice."""

    def __init__(self, native: Any, device: Device, threads: int) -> None:
        self._native = native
        self._pool = native.open(device.torch_device.index, threads, STEP_BYTES, device.copy_stream)
        self._verifies = native.hash_with(import_module("xxhash._xxhash").__file__)

    def verifies(self, block_bytes: int) -> bool:
        """Whether it can verify blocks of this size."""
        return bool(self._verifies and block_bytes % PAGE == 0 and block_bytes <= STEP_BYTES)

    def submit(self, runs: Sequence[Run], *, target: int, after: Any) -> NativeJob:
        """Read runs to their places behind the address `target`, once the event `after` is done."""
        asked = [
            (
                run.file,
                run.start,
                run.stop - run.start,
                target + run.at,
                0 if run.digests is None else run.digests.ctypes.data,
                run.block_bytes,
                run.file_bytes,
            )
            for run in runs
        ]
        event = after.cuda_event if after is not None else 0
        job = self._native.submit(self._pool, asked, event)
        return NativeJob(self._native, job, after, [run.digests for run in runs])

    def close(self) -> None:
        self._native.close(self._pool)


def open_pool(device: Device, threads: int) -> NativePool | None:
    """The pool, where there is a CUDA device and the extension was built."""
    if not device.is_cuda:
        return None
    with suppress(ImportError, OSError):
        return NativePool(import_module("stoker.load._pump"), device, threads)
    return None


class TorchRing:
    """The stages of one Python thread."""

    def __init__(self, device: Device, step: int) -> None:
        self._device, self.step = device, step
        self._stages = [device.pinned(step) for _ in range(_STAGES)]
        self._copied: list[Any] = [None] * _STAGES
        self._now = 0

    def take(self) -> Bytes:
        """A stage that may be filled."""
        self._now = (self._now + 1) % _STAGES
        if self._copied[self._now] is not None:
            self._copied[self._now].synchronize()  # the copy may still be running
        stage: Bytes = self._stages[self._now].numpy()
        return stage

    def push(self, start: int, size: int, target: torch.Tensor) -> None:
        """Copy part of the stage taken last, on the current stream."""
        target.copy_(self._stages[self._now][start : start + size], non_blocking=True)
        self._copied[self._now] = self._device.mark()

    def pump(self, file: int, offset: int, target: torch.Tensor) -> None:
        """Read from an open file to the target; EOFError where it is too short."""
        done = 0
        while done < target.numel():
            lead = (offset + done) % PAGE  # the file may be open for O_DIRECT: read from whole pages on
            here = min(self.step - (offset + done) % self.step, target.numel() - done)
            stage = self.take()[: -(-(lead + here) // PAGE) * PAGE]
            Pread().read_at_least(file, offset + done - lead, stage, lead + here)
            self.push(lead, here, target[done : done + here])
            done += here


class Rings(threading.local):
    """A ring per reading thread, of stages that hold a block of digests."""

    def __init__(self, device: Device, block_bytes: int) -> None:
        self._device, self._step = device, max(STEP_BYTES, -(-block_bytes // PAGE) * PAGE)
        self._ring: TorchRing | None = None

    def mine(self) -> TorchRing:
        if self._ring is None:
            self._ring = TorchRing(self._device, self._step)
        return self._ring
