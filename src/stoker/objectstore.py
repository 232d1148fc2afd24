"""What obstore speaks (s3, gs, az, http) as a store: the one home of obstore. `storage.open_store` opens it.

An object store shows an object only when its last part has arrived. A read that takes several requests
reads one version of the object, or says that it has changed.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote, urlsplit

from stoker.errors import AbsentError, ChangedError, DeniedError, StorageError, require
from stoker.formats.seekable import SeekableBytes
from stoker.network import Proxies, share_authorities
from stoker.urls import Entry, join_url, url_scheme

SCHEMES = {"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https"}


class ObjectStore:
    """A prefix of an object store, through obstore; credentials come from the usual variables."""

    def __init__(self, url: str, *, timeout_s: float = 0.0) -> None:
        self.url = url.rstrip("/")
        self._obstore = require("obstore", extra="object-store")
        self._pid = os.getpid()
        share_authorities()
        options = _proxy_options(_endpoint(url))
        if _wants_http(url):
            options["allow_http"] = True
        patience = _patience(timeout_s) if timeout_s else {}
        options |= patience.pop("client_options", {})
        self._streams = _PATIENT_STREAMS if timeout_s else _STREAMS
        self._store = self._call("open", "", self._from_url, self.url, client_options=options, **patience)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        chunks = iter(self._call("list", prefix, self._obstore.list, self._store, prefix=prefix or None))
        first = None
        while chunk := self._call("list", prefix, next, chunks, None):
            for meta in chunk:
                if meta["path"] == first:
                    raise StorageError(
                        f"the listing of {join_url(self.url, prefix)} begins again and again with {first}",
                        hint="its server does not heed the continuation token: look for a newer one, or name "
                        "the files one by one",
                    )
                first = first if first is not None else meta["path"]
                yield Entry(path=meta["path"], bytes=meta["size"], version=_version(meta))

    def stat(self, path: str) -> Entry:
        meta = self._call("read", path, self._obstore.head, self._store, path)
        return Entry(path=path, bytes=meta["size"], version=_version(meta))

    def open(self, path: str) -> BinaryIO:
        return io.BufferedReader(_RangeReader(self, self.stat(path)), buffer_size=_RANGE_BYTES)

    def read(self, path: str, *, most: int = 0) -> bytes:
        """All of an object, by one request: to open it takes another, for its size. An error if it has more
        than `most` bytes; 0: it may have any number."""
        answer = self._call("read", path, self._obstore.get, self._store, path)
        if most and answer.meta["size"] > most:
            raise StorageError(
                f"{join_url(self.url, path)} is {answer.meta['size']:,} bytes, which nothing of its kind is",
                hint="look at what lies there",
            )
        return bytes(self._call("read", path, answer.bytes))

    def write(self, path: str, data: bytes | Path | BinaryIO) -> None:
        self._call("write", path, self._obstore.put, self._store, path, data, max_concurrency=self._streams)

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
            if "InvalidCertificate(" in str(error):  # only its last words say so
                raise StorageError(
                    f"cannot {verb} {join_url(self.url, path)}: the server's certificate is not trusted: "
                    f"{_certificate_fault(str(error))}",
                    hint="install the certificate's authority on this system, or name its file in "
                    "SSL_CERT_FILE or AWS_CA_BUNDLE",
                ) from error
            raise self._kind_of(error)(
                f"cannot {verb} {join_url(self.url, path)}: {reason}",
                hint=f"check the name and {_credentials(self.url)}",
            ) from error

    def _kind_of(self, error: Exception) -> type[StorageError]:
        known = self._obstore.exceptions
        if isinstance(error, known.PermissionDeniedError):
            return DeniedError
        return AbsentError if isinstance(error, (known.NotFoundError, FileNotFoundError)) else StorageError


def _certificate_fault(said: str) -> str:
    """`UnknownIssuer`, or what else rustls has against it."""
    return said.rpartition("InvalidCertificate(")[2].partition(")")[0]


_STREAMS = 12  # parts of an object on their way at a time, as obstore has it
_PATIENT_STREAMS = 4  # where each must arrive in time: twelve share a narrow link too thinly


def _patience(timeout_s: float) -> dict[str, Any]:
    """Options of a client that gives up in time: a request may begin until half of it has passed, and then
    take the other half."""
    half = timedelta(seconds=timeout_s / 2)
    backoff = {"max_backoff": min(half, timedelta(seconds=5))}
    return {
        "client_options": {"timeout": half, "connect_timeout": min(half, timedelta(seconds=5))},
        "retry_config": {"retry_timeout": half, "max_retries": 10, "backoff": backoff},
    }


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


class _RangeReader(SeekableBytes):
    """A seekable view of one object, read by ranges; all of them of the version that was opened."""

    def __init__(self, store: ObjectStore, entry: Entry) -> None:
        super().__init__(entry.bytes)
        self._store, self._entry = store, entry

    def read_at(self, place: int, buffer: Any) -> int:
        data = self._store.read_range(self._entry.path, place, len(buffer), version=self._entry.version)
        buffer[: len(data)] = data
        return len(data)


def _version(meta: Any) -> str:
    """The ETag as a header carries it (a listing may leave out the quotes), or else the time of change."""
    if e_tag := (meta["e_tag"] or "").strip('"'):
        return e_tag if e_tag.startswith("W/") else f'"{e_tag}"'
    from email.utils import format_datetime  # 20 ms, and nearly every store has ETags

    return format_datetime(meta["last_modified"], usegmt=True)


def _skips_signature() -> bool:
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "yes", "on")


def _endpoint(url: str) -> str:
    """The server behind a URL, as far as it matters for proxies."""
    if url.startswith("http"):
        return url
    ours = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT")
    return ours or {"gs": "https://storage.googleapis.com", "s3": "https://s3.amazonaws.com"}.get(
        url_scheme(url), "https://blob.core.windows.net"
    )


def _proxy_options(endpoint: str) -> dict[str, Any]:
    """The proxy that the wire would use, or none: obstore's own reading of the environment differs
    (NO_PROXY)."""
    proxies = Proxies()
    if not proxies:
        return {}
    try:
        proxy = proxies.of(urlsplit(endpoint))
    except ValueError:  # no URL, which obstore will explain
        return {}
    return {"proxy_url": proxy} if proxy else {"proxy_url": "http://127.0.0.1", "proxy_excludes": "*"}


def _wants_http(url: str) -> bool:
    endpoints = (os.environ.get("AWS_ENDPOINT_URL", ""), os.environ.get("AWS_ENDPOINT", ""), url)
    return any(endpoint.startswith("http://") for endpoint in endpoints)
