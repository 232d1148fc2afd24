"""Near and far: where checkpoints lie, and which of them are whole.

A checkpoint is in the remote tier once its manifest object is there; that one is uploaded last.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from stoker.errors import BadCheckpointError, StorageError
from stoker.saved.layout import MANIFEST, newest_first
from stoker.saved.reader import Blocks, Checkpoint, Folder
from stoker.storage import Store, join_url, named_errors

FAR = "@remote"  # behind a name: the copy in the remote tier, whatever lies here


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """The folder that is saved to and, if there is one, the store it is drained to."""

    root: Path
    remote: Store | None = None

    def names(self) -> list[str]:
        """Every checkpoint of either tier, whole or not, the newest first."""
        return newest_first({*local_names(self.root), *self.remote_names()})

    def remote_names(self) -> list[str]:
        return remote_names(self.remote) if self.remote else []

    def copies(self, *, said: list[str]) -> list[str]:
        """Every checkpoint, the newest first; one that lies in both tiers is there twice, near before far.
        Without the remote tier what is here must do, if there is something: that is added to a list."""
        try:
            far = self.remote_names()
        except StorageError as error:
            if not local_names(self.root):
                raise  # a fresh start would be wrong: there may be something
            said.append(f"the remote tier: {error.message}")
            far = []
        near = local_names(self.root)
        names = newest_first({*near, *far})
        return [copy for name in names for copy in ((name, f"{name}{FAR}") if name in far else (name,))]

    def checkpoint(self, name: str) -> Checkpoint:
        """A checkpoint from the nearest place that has it; single files may come from further away."""
        near: Folder = LocalFolder(self.root / name)
        if self.remote is None:
            return Checkpoint(near)
        if name.endswith(FAR):
            return Checkpoint(RemoteFolder(self.remote, name.removesuffix(FAR)))
        return Checkpoint(BothTiers(near, RemoteFolder(self.remote, name)))

    def whole(self, names: Iterable[str], *, skipped: list[str]) -> Iterable[Checkpoint]:
        """The whole ones among these; why others are skipped is added to a list."""
        for name in names:
            checkpoint = self.checkpoint(name)
            try:
                checkpoint.check()
            except (BadCheckpointError, StorageError) as error:
                skipped.append(f"{name}: {error.message}")
                continue
            yield checkpoint

    def latest(self, *, skipped: list[str]) -> Checkpoint | None:
        """The newest whole one; why newer ones are not is added to a list."""
        return next(iter(self.whole(self.names(), skipped=skipped)), None)


def local_names(root: Path) -> list[str]:
    try:
        return newest_first(path.name for path in root.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        with named_errors("read", root):
            raise error


def remote_names(store: Store) -> list[str]:
    """The checkpoints whose manifest is in a store."""
    paths = (entry.path for entry in store.list())
    return newest_first(path.partition("/")[0] for path in paths if path.endswith(f"/{MANIFEST}"))


# --- the files of one ---------------------------------------------------------------------------------


class LocalFolder:
    """A checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name, self.url = path.name, str(path)

    def read(self, file: str) -> bytes:
        with named_errors("read", self.path / file):
            return (self.path / file).read_bytes()

    def size(self, file: str) -> int:
        with named_errors("read", self.path / file):
            return (self.path / file).stat().st_size

    def opened(self, file: str) -> Blocks:
        with named_errors("read", self.path / file):
            return _LocalBlocks(self.path / file)


class RemoteFolder:
    """A checkpoint under a prefix of a store."""

    def __init__(self, store: Store, name: str) -> None:
        self._store = store
        self.name, self.url = name, join_url(store.url, name)

    def read(self, file: str) -> bytes:
        with self._store.open(f"{self.name}/{file}") as opened:
            return opened.read()

    def size(self, file: str) -> int:
        return self._store.stat(f"{self.name}/{file}").bytes

    def opened(self, file: str) -> Blocks:
        return _RemoteBlocks(lambda: self._store.open(f"{self.name}/{file}"))


class BothTiers:
    """A checkpoint of which this node may hold some files, and the remote tier holds all."""

    def __init__(self, near: Folder, far: Folder) -> None:
        self._near, self._far = near, far
        self.name, self.url = near.name, near.url

    def read(self, file: str) -> bytes:
        return self._side(file).read(file)

    def size(self, file: str) -> int:
        return self._side(file).size(file)

    def opened(self, file: str) -> Blocks:
        return self._side(file).opened(file)

    def _side(self, file: str) -> Folder:
        try:
            self._near.size(file)
        except StorageError:
            return self._far
        return self._near


class _LocalBlocks:
    """Reads past the page cache where that works: a restore reads everything once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def read_into(self, buffer: memoryview, at: int) -> int:
        with named_errors("read", self._path):
            return os.preadv(self._handle, [buffer], at)

    def close(self) -> None:
        os.close(self._handle)


class _RemoteBlocks:
    """One reader a thread: a stream has one position."""

    def __init__(self, open_one: Callable[[], BinaryIO]) -> None:
        self._open_one, self._opened = open_one, list[BinaryIO]()
        self._mine = threading.local()

    def read_into(self, buffer: memoryview, at: int) -> int:
        if not hasattr(self._mine, "file"):
            self._mine.file = self._open_one()
            self._opened.append(self._mine.file)
        self._mine.file.seek(at)
        data = self._mine.file.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        for file in self._opened:
            file.close()
