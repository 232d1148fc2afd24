"""Small datasets on disk, with small blocks so that damage can be placed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from stoker.formats import megatron, tar
from stoker.formats.checksums import HashingFile
from stoker.formats.zstd import SeekableWriter
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest
from stoker.storage import open_store

BLOCK_BYTES = 4096


def write_files(folder: Path, name: str, files: dict[str, bytes], samples: int, tokens: int, epoch: int = 0):
    records, digests = [], []
    for suffix, content in files.items():
        with (folder / f"{name}{suffix}").open("wb") as file:
            hashing = HashingFile(file, block_bytes=BLOCK_BYTES)
            hashing.write(content)
            records.append(FileRecord(name=f"{name}{suffix}", bytes=hashing.bytes, xxh3=hashing.digest()))
            digests += hashing.blocks()
    record = ShardRecord(name=name, samples=samples, tokens=tokens, files=tuple(records), epoch=epoch)
    return record, digests


def write_dataset(folder: Path, shards, **fields) -> Path:
    manifest = Manifest(shards=tuple(record for record, _ in shards), block_bytes=BLOCK_BYTES, **fields)
    digests = np.array([digest for _, found in shards for digest in found], np.uint64)
    write_manifest(open_store(folder), manifest, blocks=digests)
    return folder


def make_tokens(
    folder: Path, lengths, *, dtype="uint16", epochs: int = 1, zstd: bool = False, turned: bool = False
) -> Path:
    """Shards of documents of these lengths. The token stream counts up, so that a token says where it
    came from (modulo the range of its type). `turned`: in every second epoch from last to first."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, at = [], 0
    for epoch in range(epochs):
        for number, some in enumerate(lengths):
            documents = some[::-1] if turned and epoch % 2 else some
            total = sum(documents)
            ids = (np.arange(at, at + total) % 60000).astype(dtype)
            at += total
            index = megatron.index_bytes(np.array(documents, np.int64), dtype=np.dtype(dtype))
            files = {".bin.zst": compressed(ids.tobytes())} if zstd else {".bin": ids.tobytes()}
            files[".idx"] = index
            shards.append(write_files(folder, f"e{epoch}-{number:04d}", files, len(documents), total, epoch))
    return write_dataset(folder, shards, format="megatron", dtype=dtype, epochs=epochs)


def compressed(data: bytes) -> bytes:
    sink = _Sink()
    writer = SeekableWriter(sink, frame_bytes=8192)
    writer.write(data)
    writer.close()
    return bytes(sink)


class _Sink(bytearray):
    def write(self, data) -> None:
        self.extend(data)


def make_tars(folder: Path, counts) -> Path:
    """Tars of so many samples each: sample n has members `id.txt` with n and `data.bin` of n bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    shards, at = [], 0
    for number, count in enumerate(counts):
        sink = _Sink()
        writer = tar.TarWriter(sink)
        for n in range(at, at + count):
            writer.add(f"s{n:06d}", [("id.txt", str(n).encode()), ("data.bin", bytes([n % 256]) * (n % 700))])
        index = tar.index_bytes(writer.close())
        shards.append(
            write_files(folder, f"t{number:04d}", {".tar": bytes(sink), ".index.npz": index}, count, 0)
        )
        at += count
    return write_dataset(folder, shards, format="webdataset")
