"""Random access: bytes that can be read from any place, as a seekable file object."""

from __future__ import annotations

import io
import os
from typing import Any


class SeekableBytes(io.RawIOBase):
    """A file of `size` bytes; whoever derives from it says how the bytes from a place on are read."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self._at = size, 0

    def read_at(self, place: int, buffer: Any) -> int:  # any writable buffer, never empty
        """Fill the buffer, or the beginning of it; how many bytes that were."""
        raise NotImplementedError

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:  # any writable buffer
        length = min(len(buffer), self.size - self._at)
        count = self.read_at(self._at, memoryview(buffer)[:length]) if length > 0 else 0
        self._at += count
        return count
