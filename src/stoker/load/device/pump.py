"""Staged host-to-device copies: stretches of files through pinned buffers, by a Python thread.

A stage is filled, its copy asked for, and it is filled again only once that copy is done: reading, copying
and computing run at the same time. The twin of the pool in C; it serves the CPU too, where a copy is just a
copy.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from stoker.load.device.streams import Device
from stoker.load.pool import STEP_BYTES
from stoker.load.reading.engines import PAGE, Bytes, Pread

_STAGES = 2  # one is filled while the other is copied


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
    """A ring per reading thread, of stages that hold what is verified at once."""

    def __init__(self, device: Device, verified: int) -> None:
        self._device, self._step = device, max(STEP_BYTES, -(-verified // PAGE) * PAGE)
        self._ring: TorchRing | None = None

    def mine(self) -> TorchRing:
        if self._ring is None:
            self._ring = TorchRing(self._device, self._step)
        return self._ring
