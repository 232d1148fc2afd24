"""Opening a dataset to load from: its manifest, its digests, and where its files lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import BadManifestError, UsageError
from stoker.manifest import BLOCKS_NAME, NAME, Manifest, read_blocks, read_manifest
from stoker.reading.files import CachedFiles, Files, Folder
from stoker.reading.layout import Documents, TarSamples, Windows, shards_of
from stoker.reading.reader import ShardReader
from stoker.storage import is_local, local_path, open_store

Source = str | Path | Files


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
    def is_tokens(self) -> bool:
        return self.manifest.format == "megatron"

    def fingerprint(self) -> str:
        """What a saved position belongs to: another dataset has another order."""
        manifest = self.manifest
        return f"{manifest.format}:{manifest.samples}:{manifest.tokens}:{manifest.blocks_xxh3}"


def open_dataset(source: Source, *, files: Files | None, engine: str, on_corrupt: str) -> Dataset:
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
    reader = ShardReader(
        files,
        sizes={file.name: file.bytes for file in manifest.files()},
        digests=digests,
        block_bytes=manifest.block_bytes,
        engine=engine,
        on_corrupt=on_corrupt,
    )
    return Dataset(name=str(source), manifest=manifest, reader=reader)


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
