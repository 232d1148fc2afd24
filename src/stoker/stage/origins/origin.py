"""URL resolution: a dataset, a folder, a file or a hub's repository, as the list of its files.

A prefix or folder that holds `manifest.json` is a dataset: the manifest is read first and says which
files there are and what their xxh3 is. Everything else is known by what its server says of it.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from stoker.errors import AbsentError, DeniedError, StorageError, UsageError
from stoker.stage.origins.content import HEAD_BYTES, check_content
from stoker.stage.wire.answers import Busy, is_busy, range_line, refuse, total_bytes, version_of
from stoker.stage.wire.client import Client, Exchange
from stoker.stage.wire.heads import Answer
from stoker.stage.wire.http import Address, NetworkError, NetworkTimeout
from stoker.stage.wire.pace import backoff_s
from stoker.storage import (
    Entry,
    LocalStore,
    ObjectStore,
    Store,
    is_local,
    join_url,
    local_path,
    open_store,
    split_url,
    url_scheme,
)
from stoker.urls import check_web

MOST_MANIFEST_BYTES = 1 << 30  # of some seven million shards; a server may send without end
_MANIFEST = "manifest.json"  # stoker.manifest.NAME; that module brings numpy, and most URLs need neither
_TRIES = 4  # over some three seconds: a listing that fails is soon told, a download is patient
_LONGEST_NAME = 255  # bytes, on every filesystem we know

_Read = TypeVar("_Read")


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """One file to bring near: where it comes from, how large it is, how we know it is right."""

    name: str  # path below the collection's folder, forward slashes
    url: str  # s3://…, gs://…, az://…, https://…, hf://…, or a local path (NFS, Lustre)
    bytes: int
    version: str = ""  # ETag (with its quotes), time of change as HTTP has it, or mtime_ns of a local file
    digest: str = ""  # "xxh3:…" of a manifest, "sha256:…", "sha1git:…" of a hub; "" = size and version only


@dataclass(frozen=True, kw_only=True, slots=True)
class Collection:
    """What one URL names."""

    url: str
    kind: str  # "dataset" | "folder" | "file" | "hub"
    files: tuple[RemoteFile, ...]
    revision: str = ""  # a hub's commit
    block_bytes: int = 0  # of a dataset: what each digest in its blocks.xxh3 is of
    left_out: tuple[str, ...] = ()  # what lies there and is no file, and why

    def __post_init__(self) -> None:
        check_names(self)


def resolve(url: str) -> Collection:
    """Ask the origin what it has under this URL."""
    scheme = url_scheme(url)
    if scheme == "hf":
        from stoker.stage.origins.hub import list_hub

        return list_hub(url)
    if scheme in ("http", "https"):
        return _resolve_web(url)
    if scheme == "memory":
        raise UsageError(f"{url} lives in one process and cannot be staged", hint="use a folder or a bucket")
    return _resolve_store(url)


def _dataset(url: str, data: bytes) -> Collection:
    """The dataset whose manifest reads so."""
    import xxhash

    from stoker.formats.checksums import block_count
    from stoker.manifest import BLOCKS_NAME, NAME, parse_manifest

    manifest = parse_manifest(data.decode("utf-8", "replace"), name=join_url(url, NAME))
    blocks = sum(block_count(record.bytes, manifest.block_bytes) for record in manifest.files())
    own = [(NAME, len(data), xxhash.xxh3_64_hexdigest(data)), (BLOCKS_NAME, 8 * blocks, manifest.blocks_xxh3)]
    records = [(record.name, record.bytes, record.xxh3) for record in manifest.files()]
    files = (
        RemoteFile(name=name, url=join_url(url, name), bytes=size, digest=f"xxh3:{digest}")
        for name, size, digest in (*own, *records)
    )
    return Collection(url=url, kind="dataset", files=tuple(files), block_bytes=manifest.block_bytes)


def check_names(collection: Collection) -> None:
    """Refuse what could not be laid down as files side by side, or would leave the folder."""
    names: set[str] = set()
    for file in collection.files:
        if not can_be_a_path(file.name):
            raise StorageError(
                f"{collection.url} holds {file.name!r}, which cannot be the name of a file",
                hint="rename it at its origin, or stage the other files one by one",
            )
        if file.name in names:
            raise StorageError(f"{collection.url} holds {file.name!r} twice", hint="rename one at the origin")
        names.add(file.name)
    folders = {folder for name in names for folder in _folders_above(name)}
    if both := sorted(names & folders):
        raise StorageError(
            f"{collection.url} holds {both[0]!r} both as a file and as a folder",
            hint="rename one at the origin, or stage a longer prefix",
        )


def can_be_a_path(name: str) -> bool:
    """Whether files can have this name below a folder: nothing that climbs, no NUL, no lone surrogate that is
    not a byte of a name."""
    try:
        sizes = [len(os.fsencode(part)) for part in name.split("/")]
    except UnicodeEncodeError:
        return False
    return "\0" not in name and all(
        part not in ("", ".", "..") and size <= _LONGEST_NAME
        for part, size in zip(name.split("/"), sizes, strict=True)
    )


# --- object stores and folders --------------------------------------------------------------------


def _resolve_store(url: str) -> Collection:
    root = str(local_path(url)) if is_local(url) else url.rstrip("/")
    if root.endswith(f"/{_MANIFEST}"):
        root = root.removesuffix(f"/{_MANIFEST}")
    store = open_store(root)
    try:
        if data := _read_manifest(store):
            return _dataset(root, data)
    except DeniedError:  # who may not list a bucket is told so of all that is not there: it may be a file
        if url.endswith("/"):
            raise
    if not url.endswith("/") and (entry := _stat_file(root)):
        return Collection(url=root, kind="file", files=(_remote(split_url(root)[0], entry),))
    left_out: list[str] = []
    if isinstance(store, LocalStore):
        listed = store.list_through_links(lambda path, why: left_out.append(f"{path} ({why})"))
    else:
        listed = store.list()
    files = tuple(_remote(root, entry) for entry in _without_folders(list(listed)))
    if not files:
        raise AbsentError(
            f"there is nothing at {url}", hint="check the name; a prefix must hold at least one file"
        )
    return Collection(url=root, kind="folder", files=files, left_out=tuple(left_out))


def _read_manifest(store: Store) -> bytes:
    """The manifest as it is, or nothing where there is none."""
    if is_local(store.url) and not (local_path(store.url) / _MANIFEST).is_file():
        return b""
    try:
        if isinstance(store, ObjectStore):
            return store.read(_MANIFEST, most=MOST_MANIFEST_BYTES)
        with store.open(_MANIFEST) as file:
            return file.read()
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return b""
        raise


def _stat_file(root: str) -> Entry | None:
    folder, name = split_url(root)
    if is_local(root):
        return open_store(folder).stat(name) if local_path(root).is_file() else None
    if not urlsplit(root).path.strip("/"):
        return None  # a whole bucket
    try:
        return open_store(folder).stat(name)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def _without_folders(entries: list[Entry]) -> Iterator[Entry]:
    """Without the empty objects that stand for folders in the consoles of object stores. Their keys end in
    a slash, which obstore does not show: they are known by what lies below them."""
    folders = {folder for entry in entries for folder in _folders_above(entry.path)}
    for entry in entries:
        if entry.path and (entry.bytes or entry.path not in folders):
            yield entry


def _folders_above(name: str) -> Iterator[str]:
    """`a` and `a/b` of `a/b/c`."""
    return (name[:at] for at, letter in enumerate(name) if letter == "/")


def _remote(root: str, entry: Entry) -> RemoteFile:
    return RemoteFile(
        name=entry.path, url=join_url(root, entry.path), bytes=entry.bytes, version=entry.version
    )


# --- the web --------------------------------------------------------------------------------------


def _resolve_web(url: str) -> Collection:
    """A dataset by its manifest, or one file. A listing is nothing that the web has."""
    check_web(url)
    with Client() as client:
        root = url.rstrip("/").removesuffix(f"/{_MANIFEST}")
        if not urlsplit(url).query and (data := _get_manifest(client, join_url(root, _MANIFEST))):
            return _dataset(root, data)
        return Collection(url=url, kind="file", files=(_get_facts(client, url),))


def _get_manifest(client: Client, url: str) -> bytes:
    """The manifest, if this is one: many servers answer any address with some page."""

    def read(answer: Answer, exchange: Exchange) -> bytes:
        if is_busy(answer):  # else a page with a list of the dataset's files would be staged in its place
            refuse(answer, exchange.text(), url=url)
        return exchange.body(begins_with=b"{", most=MOST_MANIFEST_BYTES) if answer.status == 200 else b""

    return _ask(client, url, read)


def _get_facts(client: Client, url: str) -> RemoteFile:
    """Ask for the first bytes, since a link signed for GET refuses HEAD: the answer says size and version,
    and its beginning whether this is what the name says."""

    def read(answer: Answer, exchange: Exchange) -> Answer:
        said = exchange.head()
        if answer.status not in (200, 206, 416):  # 416: no byte there, an empty file
            refuse(answer, said.decode("utf-8", "replace"), url=url)
        if answer.status != 416:
            check_content(name, said, url=url)
        return answer

    name = _name_in(url)
    answer = _ask(client, url, read, headers=range_line(0, HEAD_BYTES))
    size = total_bytes(answer)
    if size is None:
        raise StorageError(
            f"{url} does not say how large it is", hint="only a file with a Content-Length can be staged"
        )
    return RemoteFile(name=name, url=url, bytes=size, version=version_of(answer))


def _ask(client: Client, url: str, read: Callable[[Answer, Exchange], _Read], *, headers: str = "") -> _Read:
    """Ask, and ask again a few times where that may help."""
    tries = 0
    while True:
        try:
            with closing(Exchange(client, Address.of(url), headers=headers)) as exchange:
                return read(exchange.answer(), exchange)
        except (NetworkError, Busy) as error:
            tries += isinstance(error, NetworkTimeout) and 2  # each takes half a minute already
            if tries >= _TRIES:
                hint = "check the address and the network"
                raise StorageError(f"cannot read {url}: {error}", hint=hint) from error
        time.sleep(backoff_s(tries, luck=random.random()))
        tries += 1


def _name_in(url: str) -> str:
    parts = urlsplit(url)
    return unquote(parts.path.rstrip("/").rpartition("/")[2]) or parts.netloc
