"""Temporary files of tasks that were killed: known by a lock that nobody holds, and removed by the next run.

Only files of this machine are looked at: on some network filesystems a lock is not seen from another one.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any


def owner() -> str:
    """What marks a temporary file as made on this machine."""
    return f"{socket.gethostname()}."


def hold(file: Any) -> None:  # a binary file
    """Lock a new file for as long as it is open; where there are no locks it is nobody's to remove."""
    with suppress(OSError):
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)


def sweep(folders: Sequence[Path]) -> int:
    """Remove what killed tasks of this machine left half written; returns how many files. An empty one is let
    be: its maker may be about to lock it."""
    found = [path for folder in folders for path in folder.glob(f".*.{owner()}*.tmp")]
    return sum(map(_removed, found))


def _removed(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:
                return False
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # held by whoever writes it, or gone meanwhile
        return False
    return True
