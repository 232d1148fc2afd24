"""procfs and sysfs: files in which a kernel says what it has; a reading is a value or says why not."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from stoker.machine.plain import Unknown

Value = TypeVar("Value")


class Files:
    """Small files under a root: the machine's own, or a copied tree."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root

    def at(self, path: str) -> Path:
        """Where a file of the machine is to be opened."""
        return self._root / path.lstrip("/")

    def text(self, path: str) -> str | Unknown:
        """What a file says, without the end of line."""
        try:
            return self.at(path).read_text("utf-8", "replace").strip()
        except OSError as error:
            return Unknown(reason=f"{path}: {error.strerror or error}")

    def data(self, path: str, *, limit: int) -> bytes | Unknown:
        """The first bytes of a file."""
        try:
            with self.at(path).open("rb") as file:
                return file.read(limit)
        except OSError as error:
            return Unknown(reason=f"{path}: {error.strerror or error}")

    def number(self, path: str) -> int | Unknown:
        return self.parsed(path, int)

    def parsed(self, path: str, parse: Callable[[str], Value]) -> Value | Unknown:
        """A value made of a file's text."""
        text = self.text(path)
        if isinstance(text, Unknown):
            return text
        try:
            return parse(text)
        except (ValueError, IndexError, KeyError):
            return Unknown(reason=f"{path} says {text[:60]!r}")

    def names(self, path: str) -> list[str]:
        """What lies in a folder, sorted; nothing if it is not there."""
        try:
            return sorted(os.listdir(self.at(path)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return self.at(path).exists()

    def target(self, path: str) -> str:
        """Where a link of sysfs leads in the end."""
        return str(self.at(path).resolve())


def chosen(text: str) -> str:
    """`madvise` of `always [madvise] never`."""
    return text.partition("[")[2].partition("]")[0] or text.split()[0]


def cpu_list(text: str) -> tuple[int, ...]:
    """0, 1, 2, 8 of `0-2,8`."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def node_or_none(text: str) -> int | None:
    """sysfs says -1 for a device that no NUMA node owns."""
    return int(text) if int(text) >= 0 else None
