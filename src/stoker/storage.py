"""Object stores and local files behind one face: folders, memory, and what `objectstore` speaks.

`open_store(url)` gives a Store rooted at that folder or prefix; paths inside it use forward slashes.
A file appears whole or not at all: local writes go to a unique temporary name, are synced and renamed;
an object store shows an object only when its last part has arrived.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from stoker.errors import AbsentError, StorageError, UsageError
from stoker.objectstore import SCHEMES, ObjectStore
from stoker.urls import Entry, absolute, is_local, join_url, local_path, split_url, url_scheme

# With the words that callers say to a store: they need not know which module is the home of which.
__all__ = [
    "Entry",
    "LocalStore",
    "MemoryStore",
    "ObjectStore",
    "Store",
    "absolute",
    "is_local",
    "join_url",
    "local_path",
    "named_errors",
    "new_file",
    "open_store",
    "split_url",
    "sync_folder",
    "url_scheme",
]


class Store(Protocol):
    """A folder or prefix. Any thread may call any method; an object store refuses a forked child."""

    url: str

    def list(self, prefix: str = "") -> Iterator[Entry]: ...
    def stat(self, path: str) -> Entry: ...
    def open(self, path: str) -> BinaryIO: ...
    def read(self, path: str) -> bytes: ...
    def read_range(self, path: str, start: int, length: int) -> bytes: ...
    def write(self, path: str, data: bytes | Path | BinaryIO) -> None: ...
    def delete(self, path: str) -> None: ...


def open_store(url: str | Path, *, timeout_s: float = 0.0) -> Store:
    """The store rooted at a folder, `file://`, `memory://` or object-store URL. With a timeout no request to
    an object store takes longer, its retries included; without, its client tries for minutes."""
    text = str(url)
    scheme = url_scheme(text)
    if scheme in ("", "file"):
        return LocalStore(local_path(text))
    if scheme == "memory":
        return MemoryStore(text)
    if scheme in SCHEMES:
        return ObjectStore(text, timeout_s=timeout_s)
    raise UsageError(
        f"cannot open {text}: unknown scheme {scheme!r}",
        hint=f"use a local path or one of {', '.join(sorted(SCHEMES))}",
    )


@contextmanager
def new_file(path: Path, *, owner: str = "") -> Iterator[BinaryIO]:
    """Write a file that appears under its name only when the block ends well, synced to disk. Its temporary
    name tells the `owner`."""
    temporary = path.with_name(f".{path.name}.{owner}{secrets.token_hex(6)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise _storage_error(error, "write", path) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
    sync_folder(path.parent)


@contextmanager
def named_errors(verb: str, path: Path | str) -> Iterator[None]:
    """Raise what the filesystem refuses as a StorageError that names the file."""
    try:
        yield
    except OSError as error:
        raise _storage_error(error, verb, error.filename2 or error.filename or path) from error


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network filesystems refuse to sync a folder
            os.fsync(handle)
    finally:
        os.close(handle)


class LocalStore:
    """A folder of a mounted filesystem."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.url = str(root)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Folders that are links are left alone: who deletes what is listed must not follow them."""
        return self._walk(prefix, through_links=False)

    def list_through_links(
        self, left_out: Callable[[str, str], None] = lambda path, why: None
    ) -> Iterator[Entry]:
        """Links to files and folders are what they lead to. What is no file is left out, and why is told."""
        for entry in self._names("", through_links=True):
            if why := _no_file(self.root / entry):
                left_out(entry, why)
            else:
                yield self.stat(entry)

    def _walk(self, prefix: str, *, through_links: bool) -> Iterator[Entry]:
        return map(self.stat, self._names(prefix, through_links=through_links))

    def _names(self, prefix: str, *, through_links: bool) -> Iterator[str]:
        start = self.root / prefix
        if not start.is_dir():
            return
        for folder, names, files in os.walk(start, onerror=_raise_unreadable, followlinks=through_links):
            names[:] = sorted(name for name in names if not _leads_back(folder, name))
            for name in sorted(files):
                path = (Path(folder) / name).relative_to(self.root)
                yield path.as_posix()

    def stat(self, path: str) -> Entry:
        try:
            facts = (self.root / path).stat()
        except OSError as error:
            raise _storage_error(error, "read", self.root / path) from error
        return Entry(path=path, bytes=facts.st_size, version=str(facts.st_mtime_ns))

    def open(self, path: str) -> BinaryIO:
        try:
            return (self.root / path).open("rb")
        except OSError as error:
            raise _storage_error(error, "read", self.root / path) from error

    def read(self, path: str) -> bytes:
        with named_errors("read", self.root / path):
            return (self.root / path).read_bytes()

    def read_range(self, path: str, start: int, length: int) -> bytes:
        with named_errors("read", self.root / path), (self.root / path).open("rb") as file:
            return os.pread(file.fileno(), length, start)

    def write(self, path: str, data: bytes | Path | BinaryIO) -> None:
        with new_file(self.root / path) as file:
            if isinstance(data, bytes):
                file.write(data)
                return
            with data.open("rb") if isinstance(data, Path) else nullcontext(data) as source:
                while block := source.read(8 << 20):
                    file.write(block)

    def delete(self, path: str) -> None:
        """Delete a file, and the folder that held it if nothing else is in it."""
        target = self.root / path
        with named_errors("delete", target):
            target.unlink(missing_ok=True)
        with suppress(OSError):
            if target.parent != self.root:
                target.parent.rmdir()


class MemoryStore:
    """Objects in this process; the same URL is the same store."""

    _all: dict[str, dict[str, bytes]] = {}  # noqa: RUF012 - one namespace per process is the point

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._objects = self._all.setdefault(self.url, {})

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for path in sorted(self._objects):
            if path.startswith(prefix):
                yield self.stat(path)

    def stat(self, path: str) -> Entry:
        return Entry(path=path, bytes=len(self.read(path)))

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self.read(path))

    def read_range(self, path: str, start: int, length: int) -> bytes:
        return self.read(path)[start : start + length]

    def write(self, path: str, data: bytes | Path | BinaryIO) -> None:
        if isinstance(data, Path):
            data = data.read_bytes()
        self._objects[path] = data if isinstance(data, bytes) else data.read()

    def delete(self, path: str) -> None:
        self._objects.pop(path, None)

    def read(self, path: str) -> bytes:
        if path not in self._objects:
            raise AbsentError(f"{join_url(self.url, path)} does not exist", hint="check the path")
        return self._objects[path]


def _leads_back(folder: str, name: str) -> bool:
    """Whether a link leads to a folder that it lies in."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


def _no_file(path: Path) -> str:
    """Why there is nothing to read at a path, if so."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return "a link to nothing"
    return "" if stat.S_ISREG(mode) else "no plain file"


def _raise_unreadable(error: OSError) -> None:
    raise _storage_error(error, "read", error.filename) from error


def _storage_error(error: OSError, verb: str, path: Path | str) -> StorageError:
    hints = {
        errno.ENOSPC: "free space there (or choose another folder) and run the same command again",
        errno.EDQUOT: "your quota is used up: free space and run the same command again",
        errno.EACCES: "check the permissions of the file and of every folder above it",
        errno.EPERM: "check the permissions of the file and of every folder above it",
        errno.ENOENT: "check the path",
        errno.EROFS: "the filesystem is mounted read-only: choose another folder",
    }
    reason = os.strerror(error.errno) if error.errno else str(error)
    return StorageError(
        f"cannot {verb} {path}: {reason}", hint=hints.get(error.errno or 0, "see the reason above")
    )
