"""Decompressed streams: files of a dataset as verified, plain bytes; indexes, and what zstd reads from."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.errors import BadShardError
from stoker.formats.seekable import SeekableBytes
from stoker.formats.zstd import SeekableReader
from stoker.load.reading.reader import ShardReader


class PlainFile(SeekableBytes):
    """A file of the dataset as a stream of verified bytes; what the zstd reader decompresses from."""

    def __init__(self, reader: ShardReader, name: str, size: int) -> None:
        super().__init__(size)
        self._reader, self._name = reader, name

    def read_at(self, place: int, buffer: Any) -> int:
        if self._reader.read(self._name, place, np.frombuffer(buffer, np.uint8)):
            # part of an index or of a compressed frame: nothing of it can be used
            raise BadShardError(f"{self._name} is damaged", hint=self._reader.cure(self._name))
        return len(buffer)


def open_zstd(reader: ShardReader, name: str, size: int) -> SeekableReader:
    """The plain bytes of a compressed file. One thread at a time."""
    file: Any = PlainFile(reader, name, size)
    return SeekableReader(file, name=name)
