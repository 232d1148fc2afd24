"""A file as read-only memory that the processes of a machine share, and that holds no file open.

Python's own mmap keeps a descriptor for as long as anybody looks at the memory (until 3.13).
"""

from __future__ import annotations

import ctypes
import os
import weakref
from functools import cache
from mmap import MAP_SHARED, PROT_READ
from pathlib import Path
from typing import Any

_FAILED = ctypes.c_void_p(-1).value


def map_file(path: Path) -> Any:  # a buffer: ctypes has no type for it
    """The bytes of a file; unmapped when nobody holds them any more. Raises OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return b""
        address = _libc().mmap(None, size, PROT_READ, MAP_SHARED, file.fileno(), 0)
    if address == _FAILED:
        raise OSError(ctypes.get_errno(), f"cannot map {path}")
    buffer = (ctypes.c_ubyte * size).from_address(address)
    # at exit threads may still look at it
    weakref.finalize(buffer, _libc().munmap, address, size).atexit = False
    return buffer


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc
