"""Dataset manifest: `manifest.json` and the block digests beside it make a folder of shards a dataset.

The manifest counts samples, tokens and bytes, says which tokenizer, order and plan made them, and
holds the size and xxh3 of every file. `blocks.xxh3` holds one little-endian u64 per block of each
file, in the manifest's order, so that a reader can verify just the block it read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stoker.errors import BadManifestError, DeniedError, NoManifestError, StorageError
from stoker.formats.checksums import BLOCK_BYTES, block_count
from stoker.formats.mapped import map_file
from stoker.formats.sizes import counted
from stoker.storage import Store, is_local, join_url, local_path, open_store

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

NAME = "manifest.json"
BLOCKS_NAME = "blocks.xxh3"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One file of a shard."""

    name: str
    bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecord:
    """One shard: its data file first, then what indexes it."""

    name: str
    samples: int
    tokens: int
    files: tuple[FileRecord, ...]
    epoch: int = 0

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerRecord:
    """Which tokenizer made the ids, and which engine ran it."""

    name: str
    digest: str
    vocabulary: int
    eod: int | None
    engine: str
    engine_version: str
    bos: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A dataset: what its shards hold and how they came to be."""

    format: str
    shards: tuple[ShardRecord, ...]
    dtype: str = ""
    compression: str = ""
    tokenizer: TokenizerRecord | None = None
    shuffled: bool = False
    seed: int = 0
    epochs: int = 1
    plan: str = ""
    block_bytes: int = BLOCK_BYTES
    blocks_xxh3: str = ""
    made_by: str = ""
    version: int = VERSION
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def samples(self) -> int:
        return sum(shard.samples for shard in self.shards)

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)

    def files(self) -> Iterable[FileRecord]:
        """Every file, in the order of the block digests."""
        return (file for shard in self.shards for file in shard.files)

    def to_json(self) -> str:
        return json.dumps({**asdict(self), "counts": self.totals()}, indent=1) + "\n"

    def totals(self) -> dict[str, int]:
        return {"samples": self.samples, "tokens": self.tokens, "bytes": self.bytes}


def parse_manifest(text: str, *, name: str) -> Manifest:
    """The manifest in this text; a torn, foreign or newer one raises BadManifestError."""
    try:
        raw = json.loads(text)
        version = raw.pop("version")
        if version != VERSION:
            raise BadManifestError(
                f"{name} is version {version}, this stoker reads version {VERSION}",
                hint="install the stoker that wrote it, or prepare the data again",
            )
        manifest = _from_plain(raw)
        fault = next(_faults(manifest), "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadManifestError(f"{name} cannot be read: {error}", hint=_RESTORE) from error
    if fault:
        # a cause, as a torn one has: what means nothing is none, and may be replaced
        raise BadManifestError(f"{name} means nothing: {fault}", hint=_RESTORE) from ValueError(fault)
    return manifest


def read_manifest(url: str | Path) -> Manifest:
    """The manifest of a dataset folder or prefix."""
    store = open_store(url)
    name = join_url(store.url, NAME)
    try:
        with store.open(NAME) as file:
            text = file.read().decode()
    except StorageError as error:
        kind = NoManifestError if is_absent(error) else BadManifestError
        raise kind(
            f"no manifest at {name}: {error.message}",
            hint="run `stoker prepare index` to adopt a folder of Megatron or WebDataset shards",
        ) from error
    except UnicodeDecodeError as error:
        raise BadManifestError(f"{name} is not text: {error}", hint="restore it from a copy") from error
    return parse_manifest(text, name=name)


def find_manifest(url: str | Path) -> Manifest | None:
    """The manifest of a folder or prefix, or None where there is none. One that is there and cannot be
    read, or that cannot be reached, raises: nobody knows what it stands for."""
    try:
        return read_manifest(url)
    except NoManifestError as error:
        if isinstance(denied := error.__cause__, DeniedError):
            _check_unlisted(open_store(url), denied)
        return None
    except BadManifestError as error:
        if isinstance(reason := error.__cause__, StorageError):
            raise reason from reason.__cause__
        raise


def _check_unlisted(store: Store, denied: DeniedError) -> None:
    """Amazon answers 403 of what is not there to those who may not list, and of what they may not read to
    all: only a listing tells one from the other, and whoever may write must not mix them up."""
    try:
        is_there = any(entry.path == NAME for entry in store.list())
    except StorageError as error:
        raise DeniedError(
            f"{denied.message}; whether there is a dataset cannot be told, since listing is denied too",
            hint="allow reading and listing there (s3:GetObject, s3:ListBucket), or choose another place",
        ) from error
    if is_there:
        raise denied


def is_absent(error: StorageError) -> bool:
    """Whether a file was not there, rather than out of reach. Amazon also answers 403 to those who may
    read what there is but not list it."""
    reason = error.__cause__
    absent = reason is None or isinstance(reason, (FileNotFoundError, NotADirectoryError))
    return absent or isinstance(error, DeniedError)


def write_manifest(store: Store, manifest: Manifest, *, blocks: npt.NDArray[np.uint64]) -> Manifest:
    """Write the digests, then the manifest: a dataset exists once its manifest does."""
    data = blocks.astype("<u8").tobytes()
    store.write(BLOCKS_NAME, data)
    whole = replace(manifest, blocks_xxh3=xxhash.xxh3_64_hexdigest(data))
    store.write(NAME, whole.to_json().encode())
    return whole


def check_pairs(manifest: Manifest, *, name: str) -> None:
    """Who reads samples needs the data of every shard and what indexes it."""
    for shard in manifest.shards:
        if len(shard.files) != 2:
            raise BadManifestError(
                f"{name}: shard {shard.name!r} has {counted(len(shard.files), 'file')}, not data and index",
                hint=_RESTORE,
            )


def read_blocks(store: Store, manifest: Manifest) -> dict[str, npt.NDArray[np.uint64]]:
    """The block digests of every file, by name; they must match the manifest. Where they lie on this machine
    they are mapped: its ranks share them, which of 4 TB are 256 MB."""
    import numpy as np  # only here: staging reads manifests, and would start 0.1 s later

    data = _bytes_of(store)
    if xxhash.xxh3_64_hexdigest(data) != manifest.blocks_xxh3:
        raise BadManifestError(
            f"{join_url(store.url, BLOCKS_NAME)} does not match its manifest",
            hint="restore it, or run `stoker prepare index` after checking the shards",
        )
    wanted = sum(block_count(record.bytes, manifest.block_bytes) for record in manifest.files())
    if len(data) != wanted * 8:
        raise BadManifestError(
            f"{join_url(store.url, BLOCKS_NAME)} holds {counted(len(data) / 8, 'digest')}, the manifest's "
            f"files have {counted(wanted, 'block')}",
            hint=_RESTORE,
        )
    digests = np.frombuffer(data, "<u8")
    by_name, start = {}, 0
    for record in manifest.files():
        stop = start + block_count(record.bytes, manifest.block_bytes)
        by_name[record.name] = digests[start:stop]
        start = stop
    return by_name


def _bytes_of(store: Store) -> Any:  # a buffer
    if is_local(store.url):
        with suppress(OSError):  # who opens it says what is wrong
            return map_file(local_path(store.url) / BLOCKS_NAME)
    with store.open(BLOCKS_NAME) as file:
        return file.read()


def shard_from_plain(plain: dict[str, Any]) -> ShardRecord:
    """A shard record from its JSON."""
    return ShardRecord(**{**plain, "files": tuple(FileRecord(**file) for file in plain["files"])})


def _from_plain(raw: dict[str, Any]) -> Manifest:
    tokenizer = raw.pop("tokenizer")
    return Manifest(
        shards=tuple(map(shard_from_plain, raw.pop("shards"))),
        tokenizer=TokenizerRecord(**tokenizer) if tokenizer else None,
        **raw,
    )


_RESTORE = "restore it, or run `stoker prepare index` on its folder"
_ITEM_BYTES = {"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4, "int64": 8}
_MOST_BYTES = 1 << 62
_MOST_BLOCK_BYTES = 1 << 30  # a block is read whole


def is_inside(name: object) -> bool:
    """Whether a name leads to a file inside its folder, wherever that is."""
    if not isinstance(name, str) or not name or "\0" in name or name.startswith("/"):
        return False
    return not {"", ".", ".."} & set(name.split("/"))


def _faults(manifest: Manifest) -> Iterator[str]:
    """What cannot be true of any dataset, one sentence each. Digests say that bytes are what somebody wrote,
    not that they mean something."""
    if manifest.format not in ("megatron", "webdataset") or manifest.compression not in ("", "zstd"):
        yield f"format {manifest.format!r} with compression {manifest.compression!r} is unknown"
    if manifest.format == "megatron" and manifest.dtype not in _ITEM_BYTES and manifest.shards:
        yield f"dtype {manifest.dtype!r} is none of token ids"
    if not _is_count(manifest.epochs, least=1) or not _is_count(manifest.seed, least=-_MOST_BYTES):
        yield f"epochs {manifest.epochs!r} and seed {manifest.seed!r} are impossible"
    if not _is_count(manifest.block_bytes, least=1) or manifest.block_bytes > _MOST_BLOCK_BYTES:
        yield f"blocks of {manifest.block_bytes!r} bytes are impossible"
    for shard in manifest.shards:
        yield from _shard_faults(shard, manifest)
    if manifest.epochs > max(1, len({shard.epoch for shard in manifest.shards})):
        yield f"it holds shards of fewer than {counted(manifest.epochs, 'epoch')}"
    totals = manifest.totals()
    if any(manifest.counts.get(name, total) != total for name, total in totals.items()):
        yield f"its shards come to {totals}, its counts to {manifest.counts}"
    names = Counter(file.name for file in manifest.files())
    yield from (f"{name!r} is listed {count} times" for name, count in names.items() if count > 1)


def _shard_faults(shard: ShardRecord, manifest: Manifest) -> Iterator[str]:
    numbers = (shard.samples, shard.tokens, shard.epoch, *(file.bytes for file in shard.files))
    if not shard.files or not all(map(_is_count, numbers)) or shard.epoch >= manifest.epochs:
        yield f"shard {shard.name!r} has files, counts or an epoch ({numbers}) that are impossible"
        return
    yield from (f"{file.name!r} leads out of the folder" for file in shard.files if not is_inside(file.name))
    held, wanted = shard.files[0].bytes, shard.tokens * _ITEM_BYTES.get(manifest.dtype, 0)
    if manifest.format == "megatron" and not shard.files[0].name.endswith(".zst") and held != wanted:
        yield f"{shard.files[0].name} has {held:,} bytes, {counted(shard.tokens, 'token')} take {wanted:,}"


def _is_count(value: object, *, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST_BYTES
