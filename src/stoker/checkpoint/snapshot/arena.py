"""Arena: pinned host memory for snapshots, allocated once and used again."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from stoker.errors import CheckpointError

_HUGE_PAGE = 2 << 20


class Arena:
    """Host memory for snapshots: allocated once, used again, pinned where there is a GPU to copy from."""

    def __init__(self) -> None:
        self.bytes = 0
        self._memory: mmap.mmap | None = None
        self._pinned = False

    def ensure(self, size: int, *, pinned: bool) -> None:
        """Have room for so many bytes. What was there is gone if it had to grow."""
        size = -(-max(size, 1) // _HUGE_PAGE) * _HUGE_PAGE
        if size <= self.bytes and (self._pinned or not pinned):
            return
        self.close()
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = size
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.tensor.zero_()  # touch every page now, not while the loop waits for a copy
        self.address = self.tensor.data_ptr()
        if pinned:
            self._pin()

    def view(self, start: int, stop: int) -> memoryview:
        assert self._memory is not None
        return memoryview(self._memory)[start:stop]

    def close(self) -> None:
        """Give the memory back; safe twice."""
        if self._pinned:
            _cudart().cudaHostUnregister(self.address)
        self._pinned, self._memory, self.bytes = False, None, 0
        self.tensor = torch.empty(0, dtype=torch.uint8)

    def _pin(self) -> None:
        # torch's own pinned allocator rounds up to a power of two: 10 GB of state would take 16
        error = int(_cudart().cudaHostRegister(self.address, self.bytes, 0))
        if error:
            raise CheckpointError(
                f"cannot pin {self.bytes:,} bytes of host memory (CUDA error {error})",
                hint="raise the memlock limit (ulimit -l unlimited), or set max_host_bytes",
            )
        self._pinned = True


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
