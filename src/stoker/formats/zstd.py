"""Zstandard with random access: the seekable format, independent frames and a table at the end.

`zstd -d` reads such a file as any other; a reader that knows the table decompresses only the frames
it needs. Layout of the table (a skippable frame): per frame u32 compressed and u32 plain bytes; then
u32 frames, u8 descriptor 0, u32 0x8F92EAB1.
"""

from __future__ import annotations

import os
import struct
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from stoker.errors import BadShardError, require
from stoker.formats.seekable import SeekableBytes

FRAME_BYTES = 4 << 20
LEVEL = 3  # 1.0 byte a token of the sample corpus; higher levels gain little and cost much

_MOST_FRAME_BYTES = 1 << 30  # of plain bytes: one is held in memory
_SKIPPABLE, _FOOTER_MAGIC = 0x184D2A5E, 0x8F92EAB1
_FOOTER = struct.Struct("<IBI")


class Sink(Protocol):
    """Where compressed bytes go; called from the writer's thread only."""

    def write(self, data: bytes | memoryview) -> Any: ...


class SeekableWriter:
    """Compresses a stream frame by frame; `close` writes the table."""

    def __init__(self, sink: Sink, *, frame_bytes: int = FRAME_BYTES, level: int = LEVEL) -> None:
        self._sink = sink
        self._frame_bytes = frame_bytes
        self._zstd, self._level = zstd_module(), level
        self._pending = bytearray()
        self._table = bytearray()

    def write(self, data: bytes | memoryview) -> None:
        self._pending += data
        while len(self._pending) >= self._frame_bytes:
            self._emit(bytes(self._pending[: self._frame_bytes]))
            del self._pending[: self._frame_bytes]

    def close(self) -> None:
        if self._pending:
            self._emit(bytes(self._pending))
            self._pending.clear()
        footer = _FOOTER.pack(len(self._table) // 8, 0, _FOOTER_MAGIC)
        self._sink.write(struct.pack("<II", _SKIPPABLE, len(self._table) + len(footer)))
        self._sink.write(bytes(self._table) + footer)

    def _emit(self, plain: bytes) -> None:
        packed = self._zstd.compress(plain, level=self._level)
        self._sink.write(packed)
        self._table += struct.pack("<II", len(packed), len(plain))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    packed_starts: npt.NDArray[np.int64]
    plain_starts: npt.NDArray[np.int64]


class SeekableReader(SeekableBytes):
    """A seekable view of the plain bytes; holds one frame at a time."""

    def __init__(self, file: BinaryIO, *, name: str) -> None:
        self._file, self._name = file, name
        self._table = _read_table(file, name)
        super().__init__(int(self._table.plain_starts[-1]))
        self._zstd = zstd_module()
        self._frame, self._frame_number = b"", -1

    def read_at(self, place: int, buffer: Any) -> int:
        number = int(np.searchsorted(self._table.plain_starts, place, side="right")) - 1
        start = place - int(self._table.plain_starts[number])
        part = self._load(number)[start : start + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def close(self) -> None:
        self._file.close()
        super().close()

    def _load(self, number: int) -> bytes:
        if number != self._frame_number:
            first, last = self._table.packed_starts[number : number + 2]
            plain = int(self._table.plain_starts[number + 1] - self._table.plain_starts[number])
            self._file.seek(int(first))
            self._frame = self._decompress(self._file.read(int(last - first)), number, plain)
            self._frame_number = number
        return self._frame

    def _decompress(self, packed: bytes, number: int, plain_bytes: int) -> bytes:
        decompressor = self._zstd.ZstdDecompressor()
        try:  # never more than was announced, whatever the frame would grow to
            plain: bytes = decompressor.decompress(packed, max_length=plain_bytes + 1)
        except (self._zstd.ZstdError, EOFError) as error:
            raise _bad(self._name, f"frame {number}: {error}") from error
        if len(plain) != plain_bytes or not decompressor.eof:
            raise _bad(
                self._name, f"frame {number} holds {len(plain):,} bytes, its table says {plain_bytes:,}"
            )
        return plain


def zstd_module() -> Any:
    """Python's own zstd from 3.14 on, the same code as a package before."""
    if sys.version_info >= (3, 14):
        return import_module("compression.zstd")
    return require("backports.zstd", extra="tokens")


def _bad(name: str, what: str) -> BadShardError:
    return BadShardError(f"{name}: {what}", hint="fetch or prepare the shard again")


def _read_table(file: BinaryIO, name: str) -> _Table:
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _FOOTER.size))
    tail = file.read()
    frames, _, magic = _FOOTER.unpack(tail) if len(tail) == _FOOTER.size else (0, 0, 0)
    start = size - _FOOTER.size - frames * 8
    if magic != _FOOTER_MAGIC or start < 8:
        raise _bad(name, "no seek table at its end: it is cut short, or never was seekable")
    file.seek(start)
    rows = np.frombuffer(file.read(frames * 8), "<u4").reshape(-1, 2).astype(np.int64)
    starts = np.concatenate([np.zeros((1, 2), np.int64), rows.cumsum(axis=0)])
    if starts[-1, 0] != start - 8:
        raise _bad(
            name, f"its seek table describes {starts[-1, 0]:,} bytes of frames, there are {start - 8:,}"
        )
    if frames and rows[:, 1].max() > _MOST_FRAME_BYTES:
        raise _bad(name, f"a frame of {rows[:, 1].max():,} bytes is too large to be read")
    return _Table(packed_starts=starts[:, 0], plain_starts=starts[:, 1])
