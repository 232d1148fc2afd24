"""Shard writer: pass two's output, whole or not at all, hashed on the way."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import require
from stoker.formats import megatron, tar
from stoker.formats.checksums import HashingFile
from stoker.formats.zstd import SeekableWriter
from stoker.manifest import FileRecord, ShardRecord, shard_from_plain
from stoker.prepare.leftovers import hold, owner
from stoker.prepare.shuffle import Gathered, slices
from stoker.storage import new_file

_JOIN = 1024  # documents per write
_IDS = np.uint32(0x7FFF_FFFF)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What shards look like."""

    format: str
    dtype: np.dtype[Any]
    zstd: bool = False
    masked: bool = False  # a token's highest bit says that it counts in the loss
    is_mask: bool = False  # those bits are written, and not the tokens

    @property
    def spilled(self) -> np.dtype[Any]:
        """How tokens lie in scratch files."""
        return np.dtype("<u4") if self.masked else self.dtype

    @property
    def written(self) -> np.dtype[Any]:
        return np.dtype(np.uint8) if self.is_mask else self.dtype

    def shown(self, tokens: bytes | memoryview) -> bytes | memoryview:
        """Spilled tokens as they are written."""
        if not self.masked:
            return tokens
        found = np.frombuffer(tokens, self.spilled)
        return ((found >> 31) if self.is_mask else found & _IDS).astype(self.written).tobytes()

    @property
    def with_texts(self) -> bool:
        return self.format == "webdataset"


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A written shard and the digests of its files' blocks."""

    record: ShardRecord
    blocks: tuple[int, ...]

    def remove(self, folder: Path) -> None:
        for file in self.record.files:
            (folder / file.name).unlink()

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Shard:
        return cls(record=shard_from_plain(plain["record"]), blocks=tuple(plain["blocks"]))


def write_shard(
    folder: Path, name: str, groups: Iterable[Gathered], *, layout: Layout, epoch: int = 0
) -> Shard:
    """Write the documents of one shard, group after group."""
    write = {"megatron": _write_megatron, "webdataset": _write_webdataset}[layout.format]
    return write(folder, name, groups, layout, epoch)


def _write_megatron(folder: Path, name: str, groups: Iterable[Gathered], layout: Layout, epoch: int) -> Shard:
    lengths = [np.zeros(0, np.int64)]
    with hashed_file(folder / f"{name}.bin", zstd=layout.zstd) as data:
        for group in groups:
            if group.is_in_order(layout.spilled.itemsize):
                data.write(layout.shown(group.tokens))
            else:
                for views in _token_views(group, layout):
                    data.write(layout.shown(b"".join(views)))
            lengths.append(group.table["tokens"].astype(np.int64))
    sizes = np.concatenate(lengths)
    index = megatron.index_bytes(sizes, dtype=layout.written)
    return finish_shard(folder, name, data, (".idx", index), len(sizes), int(sizes.sum()), epoch)


def _write_webdataset(
    folder: Path, name: str, groups: Iterable[Gathered], layout: Layout, epoch: int
) -> Shard:
    orjson = require("orjson", extra="tokens")
    numpy_option = orjson.OPT_SERIALIZE_NUMPY
    samples = tokens = 0
    with hashed_file(folder / f"{name}.tar", zstd=layout.zstd) as data:
        archive = tar.TarWriter(data)
        for group in groups:
            texts = slices(group.texts, group.table["text_start"], group.table["text_bytes"].astype(np.int64))
            views = [view for views in _token_views(group, layout) for view in views]
            for view, text in zip(views, texts, strict=True):
                ids = np.frombuffer(layout.shown(view), layout.dtype)
                members = [
                    ("token_ids.json", orjson.dumps(ids, option=numpy_option)),
                    ("text.txt", bytes(text)),
                ]
                if layout.masked:
                    mask = np.frombuffer(view, layout.spilled) >> 31
                    members.append(("loss_mask.json", orjson.dumps(mask, option=numpy_option)))
                archive.add(f"{name.removeprefix('shard-')}{samples:08d}", members)
                samples += 1
                tokens += len(ids)
        index = archive.close()
    return finish_shard(folder, name, data, (".index.npz", tar.index_bytes(index)), samples, tokens, epoch)


def _token_views(group: Gathered, layout: Layout) -> Iterator[list[memoryview]]:
    item = layout.spilled.itemsize
    views = slices(group.tokens, group.table["start"], group.table["tokens"].astype(np.int64) * item)
    return (views[first : first + _JOIN] for first in range(0, len(views), _JOIN))


class _Hashed:
    """A data file being written: plain or compressed, hashed as it lands on disk."""

    def __init__(self, file: Any, name: str, *, zstd: bool) -> None:  # file: a binary file
        self.name = name
        self.hashing = HashingFile(file)
        self._zstd = SeekableWriter(self.hashing) if zstd else None

    def write(self, data: bytes | memoryview) -> None:
        (self._zstd or self.hashing).write(data)

    def end(self) -> None:
        if self._zstd:
            self._zstd.close()

    def record(self) -> FileRecord:
        return FileRecord(name=self.name, bytes=self.hashing.bytes, xxh3=self.hashing.digest())


@contextmanager
def hashed_file(path: Path, *, zstd: bool = False) -> Iterator[_Hashed]:
    """A new file that appears when it is whole, and its digests."""
    path = path.with_name(f"{path.name}.zst") if zstd else path
    with new_file(path, owner=owner()) as file:
        hold(file)
        hashed = _Hashed(file, path.name, zstd=zstd)
        yield hashed
        hashed.end()


def finish_shard(
    folder: Path, name: str, data: _Hashed, index: tuple[str, bytes], samples: int, tokens: int, epoch: int
) -> Shard:
    """Write what indexes a data file, and put both into a record."""
    suffix, content = index
    with hashed_file(folder / f"{name}{suffix}") as side:
        side.write(content)
    record = ShardRecord(
        name=name, samples=samples, tokens=tokens, epoch=epoch, files=(data.record(), side.record())
    )
    return Shard(record=record, blocks=data.hashing.blocks() + side.hashing.blocks())
