"""Wants: which slices of a unit that another process brings somebody waits for.

    CACHE/.stoker/wants/KEY~TOKEN    lines `FIRST STOP`, numbers of slices; gone when they have landed

Whoever holds the unit's lease brings these first. A want is a wish and nothing more: one that is forged, or
left by a process that was killed, changes the order in which slices come, and goes when its unit is whole.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Container
from contextlib import suppress

from stoker.stage.disk.grounds import read_book
from stoker.stage.disk.pins import open_own
from stoker.stage.disk.shelf import Shelf

_MOST_BYTES = 4096
_MOST_SLICES = 1 << 12  # at a time: more than a chunk ever needs
_OF = "~"  # no key holds one


class Want:
    """Slices that this process waits for; `close` when they are there. A full disk, or a folder that cannot
    be written to, only means that nobody hurries."""

    def __init__(self, shelf: Shelf, key: str, slices: range) -> None:
        self._path = shelf.wants_folder() / f"{key}{_OF}{secrets.token_hex(8)}"
        with suppress(OSError), open(self._path, "wb", opener=open_own) as file:
            file.write(f"{slices.start} {slices.stop}\n".encode())

    def close(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


def wanted(shelf: Shelf, keys: Container[str]) -> dict[str, list[range]]:
    """What is waited for of these units, as others say."""
    found: dict[str, list[range]] = {}
    folder = shelf.wants_folder()
    for name in os.listdir(folder):
        key = name.rpartition(_OF)[0]
        if key in keys:
            with suppress(OSError, ValueError):
                found.setdefault(key, []).extend(_ranges(read_book(folder / name, most=_MOST_BYTES)[0]))
    return found


def clear_wants(shelf: Shelf, key: str) -> None:
    """The unit is whole: whoever waited will see it, and the killed left theirs behind."""
    folder = shelf.wants_folder()
    for name in os.listdir(folder):
        if name.rpartition(_OF)[0] == key:
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)


def _ranges(data: bytes) -> list[range]:
    found = []
    for line in data.decode("ascii", "replace").splitlines():
        first, stop = map(int, line.split())
        if not 0 <= first < stop <= first + _MOST_SLICES:
            raise ValueError(f"{line!r} names no slices")
        found.append(range(first, stop))
    return found
