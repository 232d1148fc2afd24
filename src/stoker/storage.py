"""Where bytes live: local folders, memory, and any object store obstore speaks (s3, gs, az, http).

`open_store(url)` gives a Store rooted at that folder or prefix; paths inside it use forward slashes.
A file appears whole or not at all: local writes go to a unique temporary name, are synced and renamed;
an object store shows an object only when its last part has arrived.
"""

from __future__ import annotations

import errno
import io
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, Protocol
from urllib.parse import quote, unquote, urlsplit

from stoker.errors import ChangedError, DeniedError, StorageError, UsageError, require

_OBJECT_SCHEMES = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A file or object: its path in the store, its size, and what changes when its content does."""

    path: str
    bytes: int
    version: str = ""


class Store(Protocol):
    """A folder or prefix. Any thread may call any method; an object store refuses a forked child."""

    url: str

    def list(self, prefix: str = "") -> Iterator[Entry]: ...
    def stat(self, path: str) -> Entry: ...
    def open(self, path: str) -> BinaryIO: ...
    def write(self, path: str, data: bytes | Path | BinaryIO) -> None: ...
    def delete(self, path: str) -> None: ...


def open_store(url: str | Path) -> Store:
    """The store rooted at a folder, `file://`, `memory://` or object-store URL."""
    text = str(url)
    scheme = url_scheme(text)
    if scheme in ("", "file"):
        return LocalStore(local_path(text))
    if scheme == "memory":
        return MemoryStore(text)
    if scheme in _OBJECT_SCHEMES:
        return ObjectStore(text)
    raise UsageError(
        f"cannot open {text}: unknown scheme {scheme!r}",
        hint=f"use a local path or one of {', '.join(sorted(_OBJECT_SCHEMES))}",
    )


def url_scheme(url: str) -> str:
    """`s3` of `s3://bucket/key`; empty for a plain path."""
    head, separator, _ = url.partition("://")
    return head.lower() if separator else ""


def local_path(url: str | Path) -> Path:
    """The path behind a plain path, in which `~` is the home folder, or a `file://` URL."""
    text = str(url)
    if url_scheme(text) == "file":
        return Path(unquote(urlsplit(text).path))
    return Path.home() / text[2:] if text == "~" or text.startswith("~/") else Path(text)


def absolute(url: str | Path) -> str | Path:
    """The same place, also after the process has changed its folder."""
    return local_path(url).absolute() if is_local(url) else url


def is_local(url: str | Path) -> bool:
    return url_scheme(str(url)) in ("", "file")


def split_url(url: str) -> tuple[str, str]:
    """The folder and the name: `s3://bucket/a/b.jsonl` → (`s3://bucket/a`, `b.jsonl`)."""
    folder, separator, name = url.rstrip("/").rpartition("/")
    if not separator:
        return ".", name
    return folder or "/", name


def join_url(base: str | Path, path: str) -> str:
    return f"{str(base).rstrip('/')}/{path}" if path else str(base)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file that appears under its name only when the block ends well, synced to disk."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
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

    def list_through_links(self) -> Iterator[Entry]:
        return self._walk("", through_links=True)

    def _walk(self, prefix: str, *, through_links: bool) -> Iterator[Entry]:
        start = self.root / prefix
        if not start.is_dir():
            return
        for folder, names, files in os.walk(start, onerror=_raise_unreadable, followlinks=through_links):
            names[:] = sorted(name for name in names if not _leads_back(folder, name))
            for name in sorted(files):
                path = (Path(folder) / name).relative_to(self.root)
                yield self.stat(path.as_posix())

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
        return Entry(path=path, bytes=len(self._read(path)))

    def open(self, path: str) -> BinaryIO:
        return io.BytesIO(self._read(path))

    def write(self, path: str, data: bytes | Path | BinaryIO) -> None:
        if isinstance(data, Path):
            data = data.read_bytes()
        self._objects[path] = data if isinstance(data, bytes) else data.read()

    def delete(self, path: str) -> None:
        self._objects.pop(path, None)

    def _read(self, path: str) -> bytes:
        if path not in self._objects:
            raise StorageError(f"{join_url(self.url, path)} does not exist", hint="check the path")
        return self._objects[path]


class ObjectStore:
    """A prefix of an object store, through obstore; credentials come from the usual variables."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._obstore = require("obstore", extra="object-store")
        self._pid = os.getpid()
        options = {"allow_http": True} if _wants_http(url) else {}
        self._store = self._call("open", "", self._from_url, self.url, client_options=options)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        chunks = iter(self._call("list", prefix, self._obstore.list, self._store, prefix=prefix or None))
        while chunk := self._call("list", prefix, next, chunks, None):
            for meta in chunk:
                yield Entry(path=meta["path"], bytes=meta["size"], version=_version(meta))

    def stat(self, path: str) -> Entry:
        meta = self._call("read", path, self._obstore.head, self._store, path)
        return Entry(path=path, bytes=meta["size"], version=_version(meta))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_RangeReader(self, self.stat(path)), buffer_size=_RANGE_BYTES)

    def read(self, path: str) -> bytes:
        """All of an object, by one request: to open it takes another, for its size."""
        answer = self._call("read", path, self._obstore.get, self._store, path)
        return bytes(self._call("read", path, answer.bytes))

    def write(self, path: str, data: bytes | Path | BinaryIO) -> None:
        self._call("write", path, self._obstore.put, self._store, path, data)

    def read_range(self, path: str, start: int, length: int, *, version: str = "") -> bytes:
        """These bytes; with a version that is an ETag, only if the object still is that version."""
        options: dict[str, Any] = {"range": (start, start + length)}
        if version.startswith('"'):
            options["if_match"] = version
        answer = self._call("read", path, self._obstore.get, self._store, path, options=options)
        return bytes(self._call("read", path, answer.bytes))

    def sign(self, paths: Sequence[str], *, expires_s: float) -> tuple[str, ...]:
        """A URL for each path that anyone may GET until it expires (10 µs each); for a public bucket
        (AWS_SKIP_SIGNATURE=true) its plain URL."""
        lasts, public = timedelta(seconds=expires_s), self.url.startswith("s3") and _skips_signature()
        store = self._with_placeholder_keys() if public else self._store
        urls = self._call("sign", "", self._obstore.sign, store, "GET", list(paths), lasts)
        return tuple(url.partition("?")[0] if public else url for url in urls)

    def _with_placeholder_keys(self) -> Any:
        """obstore knows where a bucket's objects are, and tells it only to those who sign."""
        keys = {"access_key_id": "none", "secret_access_key": "none", "skip_signature": False}
        return self._call("open", "", self._from_url, self.url, client_options={"allow_http": True}, **keys)

    def delete(self, path: str) -> None:
        self._call("delete", path, self._obstore.delete, self._store, path)

    def _from_url(self, url: str, **options: Any) -> Any:
        scheme, _, rest = url.partition("://")
        if not scheme.startswith("http"):  # a key is meant as it is written, also with %, ? or # in it
            url = f"{scheme}://{quote(rest)}"
        return require("obstore.store", extra="object-store").from_url(url, **options)

    def _call(self, verb: str, path: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Call obstore. Its runtime threads do not survive a fork: a child that used it would hang."""
        if os.getpid() != self._pid:
            raise StorageError(
                f"{self.url} was opened before this process was forked, and its client would hang here",
                hint="start worker processes with the 'spawn' method, or open the store in the child",
            )
        try:
            return function(*args, **kwargs)
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            reason = str(error).split("\n\n")[0]
            if isinstance(error, self._obstore.exceptions.PreconditionError):
                raise ChangedError(
                    f"{join_url(self.url, path)} changed while it was read: {reason}", hint="read it again"
                ) from error
            denied = isinstance(error, self._obstore.exceptions.PermissionDeniedError)
            raise (DeniedError if denied else StorageError)(
                f"cannot {verb} {join_url(self.url, path)}: {reason}",
                hint=f"check the name and {_credentials(self.url)}",
            ) from error


def _credentials(url: str) -> str:
    """Where a store's credentials come from, in words."""
    scheme = url_scheme(url)
    if scheme in ("http", "https"):
        return "the server: it must allow range requests, and ask for no login"
    if scheme == "gs":
        return "the credentials (GOOGLE_APPLICATION_CREDENTIALS)"
    if scheme in ("az", "azure", "abfs", "abfss", "adl"):
        return "the credentials (AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY)"
    return (
        "the credentials (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION), "
        "and AWS_ENDPOINT_URL for a store that is not Amazon's"
    )


# One request per read-ahead: large enough that request latency (10-50 ms) is small beside the transfer.
_RANGE_BYTES = 8 << 20


class _RangeReader(io.RawIOBase):
    """A seekable view of one object, read by ranges; all of them of the version that was opened."""

    def __init__(self, store: ObjectStore, entry: Entry) -> None:
        super().__init__()
        self._store, self._entry, self._at = store, entry, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.bytes}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:  # any writable buffer
        length = min(len(buffer), self._entry.bytes - self._at)
        if length <= 0:
            return 0
        data = self._store.read_range(self._entry.path, self._at, length, version=self._entry.version)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _version(meta: Any) -> str:
    """The ETag as a header carries it (a listing may leave out the quotes), or else the time of change."""
    if e_tag := (meta["e_tag"] or "").strip('"'):
        return e_tag if e_tag.startswith("W/") else f'"{e_tag}"'
    from email.utils import format_datetime  # 20 ms, and nearly every store has ETags

    return format_datetime(meta["last_modified"], usegmt=True)


def _skips_signature() -> bool:
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")


def _wants_http(url: str) -> bool:
    endpoints = (os.environ.get("AWS_ENDPOINT_URL", ""), os.environ.get("AWS_ENDPOINT", ""), url)
    return any(endpoint.startswith("http://") for endpoint in endpoints)


def _leads_back(folder: str, name: str) -> bool:
    """Whether a link leads to a folder that it lies in."""
    path = os.path.join(folder, name)
    return os.path.islink(path) and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(path))


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
