"""Memory trial: 64 MiB locked with mlock(), as registering memory with an adapter does."""

from __future__ import annotations

import ctypes
import mmap
import os
import time

from stoker.machine.trials import LockTrial

BYTES = 64 << 20


def try_locking() -> LockTrial:
    """Lock, and let go."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(-1, BYTES) as memory:
        held = (ctypes.c_char * BYTES).from_buffer(memory)
        begun = time.monotonic()
        refused = libc.mlock(ctypes.byref(held), ctypes.c_size_t(BYTES))
        number, seconds = ctypes.get_errno(), time.monotonic() - begun
        libc.munlock(ctypes.byref(held), ctypes.c_size_t(BYTES))
        del held  # a view of it would keep the memory from closing
    return LockTrial(bytes=BYTES, seconds=seconds, error=os.strerror(number) if refused else None)
