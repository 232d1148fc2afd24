"""Dataset: its manifest, its digests, and where its files lie, opened to load from."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stoker.errors import BadManifestError, UsageError
from stoker.formats.megatron import read_dtype
from stoker.load.reading.files import CachedFiles, Files, Folder
from stoker.load.reading.foreign import open_foreign
from stoker.load.reading.items import ItemsDataset, open_items, open_raw
from stoker.load.reading.layout import Documents, TarSamples, Windows, shards_of
from stoker.load.reading.reader import ShardReader
from stoker.manifest import BLOCKS_NAME, NAME, Manifest, check_pairs, read_blocks, read_manifest
from stoker.storage import is_local, local_path, open_store


class MapStyle(Protocol):
    """Numbered samples of any kind."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: Any, /) -> Any: ...


Source = str | Path | Files | MapStyle


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """An opened dataset; `reader` is to be closed."""

    name: str
    manifest: Manifest
    reader: ShardReader

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = np.dtype(self.manifest.dtype)
        return dtype

    def windows(self, seq_len: int, epoch: int = 0) -> Windows:
        layout = Windows(shards_of(self.manifest, epoch), dtype=self.dtype, seq_len=seq_len)
        if not layout.samples:
            raise UsageError(
                f"{self.name} has no shard of {seq_len + 1:,} tokens",
                hint="use a shorter seq_len or more data",
            )
        return layout

    def documents(self, epoch: int = 0) -> Documents:
        return Documents(shards_of(self.manifest, epoch), self.reader, dtype=self.dtype)

    def samples(self, epoch: int = 0) -> TarSamples:
        return TarSamples(shards_of(self.manifest, epoch), self.reader)

    @property
    def epochs(self) -> int:
        return max(1, self.manifest.epochs)

    @property
    def is_tokens(self) -> bool:
        return self.manifest.format == "megatron"

    def fingerprint(self) -> str:
        """What a saved position belongs to: another dataset has another order."""
        manifest = self.manifest
        return f"{manifest.format}:{manifest.samples}:{manifest.tokens}:{manifest.blocks_xxh3}"


def open_any(
    source: Source, *, files: Files | None, engine: str, on_corrupt: str, bin_dtype: str
) -> Dataset | ItemsDataset:
    """A dataset of shards, a raw file of token ids, a folder of another library, or numbered samples."""
    if isinstance(source, (str, Path)):
        if is_local(source) and (path := local_path(source)).suffix == ".bin" and path.is_file():
            return open_raw(path, dtype=bin_dtype)
        if is_local(source) and (found := open_foreign(local_path(source))) is not None:
            return replace(open_items(found), name=str(source))
    elif not hasattr(source, "local_path"):
        return open_items(source)
    shards: Any = source
    return open_dataset(shards, files=files, engine=engine, on_corrupt=on_corrupt)


def open_dataset(source: str | Path | Files, *, files: Files | None, engine: str, on_corrupt: str) -> Dataset:
    """A folder, a URL whose files `files` brings near, or an object that knows where its files lie."""
    if not isinstance(source, (str, Path)):
        files = source
        source = brought(files)
    elif files is None:
        if not is_local(source):
            raise UsageError(
                f"{source} is not on this machine", hint="stage it first, or let `stoker.feed` do so"
            )
        files = Folder(local_path(source))
    manifest, digests = read_books(source, files)
    check_pairs(manifest, name=str(source))
    _check_dtype(manifest, files)
    reader = ShardReader(
        files,
        sizes={file.name: file.bytes for file in manifest.files()},
        digests=digests,
        block_bytes=manifest.block_bytes,
        engine=engine,
        on_corrupt=on_corrupt,
    )
    return Dataset(name=str(source), manifest=manifest, reader=reader)


def _check_dtype(manifest: Manifest, files: Files) -> None:
    """What the first index says of its tokens, where it lies here: windows of tokens need no index, and would
    be read as another type without a word."""
    if manifest.format != "megatron" or not manifest.shards or isinstance(files, CachedFiles):
        return
    path = files.local_path(manifest.shards[0].files[1].name)
    with suppress(OSError):  # who needs it will say that it is not there
        found = read_dtype(path)
        if found != manifest.dtype:
            raise BadManifestError(
                f"the manifest says that tokens are {manifest.dtype}, {path} says {found}",
                hint="restore both from one copy, or run `stoker prepare index` after deleting the manifest",
            )


def brought(files: Files) -> Path:
    """The folder in which the manifest and the digests now lie."""
    files.local_path(BLOCKS_NAME)
    return files.local_path(NAME).parent


def read_books(
    source: str | Path, files: Files
) -> tuple[Manifest, dict[str, np.ndarray[Any, np.dtype[np.uint64]]]]:
    """The manifest and the block digests; damaged ones are brought again where that is possible."""
    try:
        manifest = read_manifest(source)
        return manifest, read_blocks(open_store(source), manifest)
    except BadManifestError:
        if not isinstance(files, CachedFiles):
            raise
    for name in (NAME, BLOCKS_NAME):
        files.refetch(name, damaged=files.local_path(name).stat().st_ino)
    manifest = read_manifest(source)
    return manifest, read_blocks(open_store(source), manifest)
