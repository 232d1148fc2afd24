"""Shared-memory ring buffer between a worker process and its parent, whose space is really there.

A write into a mapped file whose pages cannot be allocated kills the process with a bus error: the fate of
loaders in containers with 64 MB of /dev/shm. So the space is reserved first (posix_fallocate), fitted to
what /dev/shm has left, in a file without a name, which no SIGKILL can leave behind. Where /dev/shm is too
small the file lies in the temporary folder.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StorageError

SHM = Path("/dev/shm")
STATUS_BYTES = 4096  # at the front: what the worker is working on

_LEAST_SLOT = 256 << 10
_SLOTS = 4
_LEFT_TO_OTHERS = 0.5  # of what /dev/shm has left: NCCL and other loaders live there too


@dataclass(frozen=True, kw_only=True, slots=True)
class RingPlan:
    """Where a ring goes and how large it is."""

    folder: Path
    slots: int
    slot_bytes: int
    reason: str

    @property
    def bytes(self) -> int:
        return STATUS_BYTES + self.slots * self.slot_bytes


def plan_ring(*, wanted: int, free: int, rings: int, shm: Path, files: Path) -> RingPlan:
    """Fit a ring of `wanted` bytes into what is left of /dev/shm, shared by `rings` of them. Pure."""
    slot = max(_LEAST_SLOT, wanted // _SLOTS // mmap.PAGESIZE * mmap.PAGESIZE)
    room = int(free * _LEFT_TO_OTHERS) // rings - STATUS_BYTES
    for slots in (_SLOTS, 2):
        if slots * slot <= room:
            return RingPlan(folder=shm, slots=slots, slot_bytes=slot, reason=f"{slots} slots fit {shm}")
    fitted = room // 2 // mmap.PAGESIZE * mmap.PAGESIZE
    if fitted >= _LEAST_SLOT:
        return RingPlan(folder=shm, slots=2, slot_bytes=fitted, reason=f"slots made smaller to fit {shm}")
    reason = f"{shm} has {free:,} bytes left: using files in {files}"
    return RingPlan(folder=files, slots=_SLOTS, slot_bytes=slot, reason=reason)


def free_bytes(folder: Path) -> int:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return 0
    return facts.f_bavail * facts.f_frsize


class Ring:
    """A mapped file of slots. Both sides map it; `close` is safe twice."""

    def __init__(self, handle: int, plan: RingPlan) -> None:
        self.plan, self._handle = plan, handle
        self._map = mmap.mmap(handle, plan.bytes)

    def slot(self, number: int) -> memoryview:
        start = STATUS_BYTES + number * self.plan.slot_bytes
        return memoryview(self._map)[start : start + self.plan.slot_bytes]

    def say(self, status: str) -> None:
        """Note what is being worked on, for whoever finds this process dead."""
        text = status.encode()[: STATUS_BYTES - 2]
        self._map[: len(text) + 1] = text + b"\0"

    def status(self) -> str:
        return self._map[:STATUS_BYTES].partition(b"\0")[0].decode(errors="replace")

    @property
    def handle(self) -> int:
        return self._handle

    def close(self) -> None:
        if self._handle >= 0:
            self._map.close()
            os.close(self._handle)
            self._handle = -1


def make_ring(*, wanted: int, rings: int, shm: Path = SHM, files: Path | None = None) -> Ring:
    """A ring with its space reserved, in /dev/shm or, where that is too small, in a file."""
    files = files or Path(tempfile.gettempdir())
    plan = plan_ring(wanted=wanted, free=free_bytes(shm), rings=rings, shm=shm, files=files)
    try:
        return _reserve(plan)
    except OSError:
        if plan.folder == files:
            raise _no_room(plan) from None
    # somebody else took what statvfs had promised
    plan = plan_ring(wanted=wanted, free=0, rings=rings, shm=shm, files=files)
    try:
        return _reserve(plan)
    except OSError:
        raise _no_room(plan) from None


def _reserve(plan: RingPlan) -> Ring:
    handle = _unnamed_file(plan.folder)
    try:
        os.posix_fallocate(handle, 0, plan.bytes)
        return Ring(handle, plan)
    except BaseException:
        os.close(handle)
        raise


def _unnamed_file(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError:  # a filesystem without unnamed files
        handle, name = tempfile.mkstemp(prefix="stoker-ring-", dir=folder)
        os.unlink(name)
        return handle


def _no_room(plan: RingPlan) -> StorageError:
    return StorageError(
        f"no room for {plan.bytes:,} bytes of shared memory in {SHM} or {plan.folder}",
        hint="make /dev/shm larger (docker --shm-size, a Memory emptyDir), free the temporary folder, "
        "lower memory=, or use workers='thread'",
    )
