"""What makes a folder of shards a dataset: `manifest.json` and the block digests beside it.

The manifest counts samples, tokens and bytes, says which tokenizer, order and plan made them, and
holds the size and xxh3 of every file. `blocks.xxh3` holds one little-endian u64 per block of each
file, in the manifest's order, so that a reader can verify just the block it read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from stoker.errors import BadManifestError, DeniedError, StorageError
from stoker.formats.checksums import BLOCK_BYTES, block_count
from stoker.storage import Store, join_url, open_store

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
        totals = {"samples": self.samples, "tokens": self.tokens, "bytes": self.bytes}
        return json.dumps({**asdict(self), "counts": totals}, indent=1) + "\n"


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
        return _from_plain(raw)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadManifestError(
            f"{name} cannot be read: {error}",
            hint="restore it, or run `stoker prepare index` on its folder",
        ) from error


def read_manifest(url: str | Path) -> Manifest:
    """The manifest of a dataset folder or prefix."""
    store = open_store(url)
    name = join_url(store.url, NAME)
    try:
        with store.open(NAME) as file:
            text = file.read().decode()
    except StorageError as error:
        raise BadManifestError(
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
    except BadManifestError as error:
        reason = error.__cause__
        if not isinstance(reason, StorageError):
            raise
        if is_absent(reason):
            return None
        raise reason from reason.__cause__


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


def read_blocks(store: Store, manifest: Manifest) -> dict[str, npt.NDArray[np.uint64]]:
    """The block digests of every file, by name; they must match the manifest."""
    import numpy as np  # only here: staging reads manifests, and would start 0.1 s later

    with store.open(BLOCKS_NAME) as file:
        data = file.read()
    if xxhash.xxh3_64_hexdigest(data) != manifest.blocks_xxh3:
        raise BadManifestError(
            f"{join_url(store.url, BLOCKS_NAME)} does not match its manifest",
            hint="restore it, or run `stoker prepare index` after checking the shards",
        )
    digests = np.frombuffer(data, "<u8")
    by_name, start = {}, 0
    for record in manifest.files():
        stop = start + block_count(record.bytes, manifest.block_bytes)
        by_name[record.name] = digests[start:stop]
        start = stop
    return by_name


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
