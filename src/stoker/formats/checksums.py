"""Checksums: xxh3 of a file and of each of its blocks, so that a reader can verify exactly what it reads."""

from __future__ import annotations

from typing import BinaryIO

import xxhash

# A chunk that ends inside a block that nobody has verified yet reads the rest of it in vain: of a first epoch
# past the page cache, in chunks of 4 MiB, blocks of 1 MiB made a quarter more to read, and these 4%. A TB of
# shards needs 64 MB of digests. Part of `stage`'s slices, which are checked by these as they land.
BLOCK_BYTES = 128 << 10


class HashingFile:
    """Passes writes on to a file and hashes them on the way."""

    def __init__(self, file: BinaryIO, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._file = file
        self._block_bytes = block_bytes
        self._whole = xxhash.xxh3_64()
        self._block = xxhash.xxh3_64()
        self._room = block_bytes
        self._digests: list[int] = []
        self.bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        view = memoryview(data).cast("B")
        self.bytes += len(view)
        self._whole.update(view)
        while len(view) >= self._room:
            self._block.update(view[: self._room])
            view = view[self._room :]
            self._close_block()
        self._block.update(view)
        self._room -= len(view)

    def digest(self) -> str:
        """The xxh3-64 of everything written, as 16 hex digits (what `xxhsum -H3` prints)."""
        return self._whole.hexdigest()

    def blocks(self) -> tuple[int, ...]:
        """The xxh3-64 of each block; the last one may be short."""
        if self._room < self._block_bytes:
            self._close_block()
        return tuple(self._digests)

    def _close_block(self) -> None:
        self._digests.append(self._block.intdigest())
        self._block.reset()
        self._room = self._block_bytes


class _Nowhere:
    def write(self, data: bytes | memoryview) -> int:
        return len(data)


def hash_file(file: BinaryIO, *, block_bytes: int = BLOCK_BYTES) -> HashingFile:
    """Read a file to its end and hash it."""
    hashing = HashingFile(_Nowhere(), block_bytes=block_bytes)  # type: ignore[arg-type]
    while block := file.read(block_bytes):
        hashing.write(block)
    return hashing


def block_count(file_bytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    return -(-file_bytes // block_bytes)
