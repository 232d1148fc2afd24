"""Storage tiers, near and far: where checkpoints lie, and which of them are whole.

A checkpoint is in the remote tier once its manifest object is there; that one is uploaded last.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.checkpoint.saved.layout import MANIFEST, newest_first, sequence_of
from stoker.checkpoint.saved.reader import Blocks, Checkpoint, Folder
from stoker.errors import BadCheckpointError, StorageError
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

    def checkpoint(self, name: str, *, told: Mapping[str, str] | None = None) -> Checkpoint:
        """A checkpoint from the nearest place that has it; single files may come from further away. Its small
        files are read once, or not at all if they were told."""
        near = LocalFolder(self.root / name)
        if self.remote is None:
            return Checkpoint(Remembered(near, told))
        if name.endswith(FAR):
            return Checkpoint(Remembered(RemoteFolder(self.remote, name.removesuffix(FAR)), told))
        return Checkpoint(Remembered(BothTiers(near, RemoteFolder(self.remote, name)), told))

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
    return newest_first(name for name, folder in remote_folders(store).items() if folder.sizes([MANIFEST]))


def remote_folders(store: Store) -> dict[str, RemoteFolder]:
    """Everything that looks like a checkpoint in a store, with the sizes of its files, by one listing."""
    known: dict[str, dict[str, int]] = {}
    for entry in store.list():
        name, _, file = entry.path.partition("/")
        if sequence_of(name) is not None:
            known.setdefault(name, {})[file] = entry.bytes
    return {name: RemoteFolder(store, name, known=sizes) for name, sizes in known.items()}


# --- the files of one ---------------------------------------------------------------------------------


class LocalFolder:
    """A checkpoint in a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name, self.url = path.name, str(path)

    def read(self, file: str) -> bytes:
        with named_errors("read", self.path / file):
            return read_file(self.path / file)

    def sizes(self, files: Collection[str]) -> Mapping[str, int]:
        found = {}
        for file in files:
            with named_errors("read", self.path / file), suppress(FileNotFoundError, NotADirectoryError):
                found[file] = (self.path / file).stat().st_size
        return found

    def opened(self, file: str) -> Blocks:
        with named_errors("read", self.path / file):
            return _LocalBlocks(self.path / file)


class RemoteFolder:
    """A checkpoint under a prefix of a store; the sizes of its files may be known from a listing."""

    def __init__(self, store: Store, name: str, *, known: Mapping[str, int] | None = None) -> None:
        self._store, self._known = store, known
        self.name, self.url = name, join_url(store.url, name)

    def read(self, file: str) -> bytes:
        return self._store.read(f"{self.name}/{file}")

    def sizes(self, files: Collection[str]) -> Mapping[str, int]:
        """By one listing: to ask for each takes as many requests as there are files."""
        found = self._known
        if found is None:
            listed = self._store.list(f"{self.name}/")
            found = {entry.path.rpartition("/")[2]: entry.bytes for entry in listed}
        return {file: found[file] for file in files if file in found}

    def opened(self, file: str) -> Blocks:
        return _RemoteBlocks(self._store, f"{self.name}/{file}")


class BothTiers:
    """A checkpoint of which this node may hold some files, and the remote tier holds all."""

    def __init__(self, near: LocalFolder, far: Folder) -> None:
        self._near, self._far = near, far
        self.name, self.url = near.name, near.url

    def read(self, file: str) -> bytes:
        return self._side(file).read(file)

    def sizes(self, files: Collection[str]) -> Mapping[str, int]:
        found = dict(self._near.sizes(files))
        missing = [file for file in files if file not in found]
        return {**found, **self._far.sizes(missing)} if missing else found

    def opened(self, file: str) -> Blocks:
        return self._side(file).opened(file)

    def _side(self, file: str) -> Folder:
        return self._near if self._near.sizes([file]) else self._far


class Remembered:
    """A checkpoint whose small files are kept in memory once they are read, so that they can be told."""

    def __init__(self, folder: Folder, told: Mapping[str, str] | None = None) -> None:
        self._folder = folder
        self.texts = dict(told or {})
        self.name, self.url = folder.name, folder.url

    def read(self, file: str) -> bytes:
        if file not in self.texts:
            data = self._folder.read(file)
            with suppress(UnicodeDecodeError):  # damaged: whoever reads it will say so
                self.texts[file] = data.decode()
            return data
        return self.texts[file].encode()

    def sizes(self, files: Collection[str]) -> Mapping[str, int]:
        return self._folder.sizes(files)

    def opened(self, file: str) -> Blocks:
        return self._folder.opened(file)


class _LocalBlocks:
    """Reads past the page cache where that works: a restore reads everything once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._handle = _open_file(path, os.O_DIRECT)
        except OSError:
            self._handle = _open_file(path)

    def read_into(self, buffer: memoryview, at: int) -> int:
        with named_errors("read", self._path):
            return os.preadv(self._handle, [buffer], at)

    def close(self) -> None:
        os.close(self._handle)


def read_file(path: Path) -> bytes:
    """What is in a file; a folder shared with others may hold a pipe of its name, which nobody ever fills."""
    with os.fdopen(_open_file(path), "rb") as file:
        return file.read()


def _open_file(path: Path, flags: int = 0) -> int:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no plain file", str(path))
    return handle


class _RemoteBlocks:
    """One request for every read."""

    def __init__(self, store: Store, path: str) -> None:
        self._store, self._path = store, path

    def read_into(self, buffer: memoryview, at: int) -> int:
        data = self._store.read_range(self._path, at, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        pass
