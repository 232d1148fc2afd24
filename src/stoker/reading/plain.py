"""Files of a dataset as streams of verified, plain bytes: indexes, and what zstd decompresses from."""

from __future__ import annotations

import io
import os
from typing import Any

import numpy as np

from stoker.errors import BadShardError
from stoker.formats.zstd import SeekableReader
from stoker.reading.reader import ShardReader


class PlainFile(io.RawIOBase):
    """A file of the dataset as a stream of verified bytes; what the zstd reader decompresses from."""

    def __init__(self, reader: ShardReader, name: str, size: int) -> None:
        super().__init__()
        self._reader, self._name, self._size, self._at = reader, name, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:  # any writable buffer
        length = max(0, min(len(buffer), self._size - self._at))
        out = np.frombuffer(buffer, np.uint8)[:length]
        if length:
            if self._reader.read(self._name, self._at, out):
                # part of an index or of a compressed frame: nothing of it can be used
                raise BadShardError(f"{self._name} is damaged", hint=self._reader.cure(self._name))
            self._at += length
        return length


def open_zstd(reader: ShardReader, name: str, size: int) -> SeekableReader:
    """The plain bytes of a compressed file. One thread at a time."""
    file: Any = PlainFile(reader, name, size)
    return SeekableReader(file, name=name)
