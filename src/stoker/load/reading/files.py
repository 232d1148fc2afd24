"""File location: where the files of a dataset lie, and who heals one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from stoker.errors import UsageError
from stoker.manifest import is_inside


class Files(Protocol):
    """Where the dataset's files lie: a folder, or a cache that brings them near first. Called from
    reading threads."""

    def local_path(self, name: str) -> Path: ...


@runtime_checkable
class CachedFiles(Files, Protocol):
    """Files that may be evicted when they are not read, and brought again when they are damaged."""

    open_files: int  # how many a reader may keep open: an open file takes its space, evicted or not

    def within(self, name: str, start: int, stop: int) -> tuple[Path, bool]:
        """Where these bytes of a file lie, which come before others; and whether the whole file does. One
        that is still landing is there for a moment: if it is gone when it is opened, ask again."""

    @property
    def is_coming(self) -> bool:
        """Whether some of what is read is still to be brought, or may have to be again."""

    def release(self, name: str) -> None: ...

    def refetch(self, name: str, *, damaged: int) -> None:
        """Bring it again, unless the inode found damaged (0: none was there) has been replaced already."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on a mounted filesystem."""

    root: Path

    def local_path(self, name: str) -> Path:
        if not is_inside(name):
            raise UsageError(
                f"{name!r} is no file inside {self.root}", hint="give a name relative to the folder"
            )
        return self.root / name
