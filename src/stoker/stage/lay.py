"""Many small files written, and moved to their names: in C where the extension was built, else one by one.

With a turn of the interpreter for every system call, lanes and publishers waited for one another: of 2 s that
4,000 files took under a tracer, a lane spent 0.3 s asking for its turn.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Sequence

from stoker.native import native


def write_files(files: Sequence[tuple[str, memoryview]]) -> None:
    """Each under its path, in place of what was there. The memory must be one that can be written to, for
    there is no other whose address we may ask for."""
    if lay := native("stage._lay"):
        lay.write([(os.fsencode(path), _address(data), len(data)) for path, data in files])
        return
    for path, data in files:
        with open(path, "wb", buffering=0) as file:
            while len(data):
                data = data[file.write(data) :]


def move_files(moves: Iterable[tuple[str, str]]) -> None:
    """Each to its new path, in this order."""
    if lay := native("stage._lay"):
        lay.move([(os.fsencode(old), os.fsencode(new)) for old, new in moves])
        return
    for old, new in moves:
        os.rename(old, new)


def _address(data: memoryview) -> int:
    if not len(data):
        return 0
    return ctypes.addressof(ctypes.c_char.from_buffer(data))
