"""JSON that is not a record a line: arrays of records and records over many lines, streamed.

What is read is turned, byte for byte, into a record a line: a line break inside a record becomes a carriage
return, the comma between two records of an array a line break. So places stay the file's own, an array of
any length takes no more memory than its longest record, and what reads lines reads the rest.
"""

from __future__ import annotations

import io
import re
from typing import Any

_MARK = re.compile(rb'["\[\]{},\n]')
_IN_STRING = re.compile(rb'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)
_LINE, _RETURN, _SPACE = b"\n\r "


def is_unfolded(head: bytes) -> bool:
    """Whether a file that starts so is an array, or records that are printed over many lines."""
    first = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    return first.startswith(b"[") or first.partition(b"\n")[0].strip() == b"{"


class Unfolded(io.RawIOBase):
    """The bytes of such a file with a record a line."""

    def __init__(self, file: Any) -> None:  # a binary file
        self._file = file
        self._read = getattr(file, "readinto1", file.readinto)
        self._depth = 0  # of brackets, in the record or array we are in
        self._in_array = self._in_string = self._escaped = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # a writable buffer
        count = int(self._read(buffer) or 0)
        if not count and (self._depth or self._in_string):
            raise EOFError("it ends in the middle of an array or record")
        self._turn(memoryview(buffer)[:count])
        return count

    def readinto1(self, buffer: Any) -> int:
        return self.readinto(buffer)

    def _turn(self, data: memoryview) -> None:
        at = int(self._escaped and len(data) > 0)
        self._escaped = self._escaped and not at
        while at < len(data):
            if self._in_string:
                at = _end_of(_IN_STRING.match(data, at))
                self._escaped = at < len(data) and data[at] != ord('"')  # a backslash ends the block
                self._in_string = at == len(data) or self._escaped
                at += 1
            else:
                mark = _MARK.search(data, at)
                if mark is None:
                    return
                at = mark.end()
                self._turn_mark(data, at - 1)

    def _turn_mark(self, data: memoryview, at: int) -> None:
        mark = chr(data[at])
        if mark == '"':
            self._in_string = True
        elif mark in "[{":
            if not self._depth and mark == "[":
                self._in_array, data[at] = True, _SPACE
            self._depth += 1
        elif mark in "]}":
            self._depth = max(0, self._depth - 1)
            if not self._depth and self._in_array:
                self._in_array, data[at] = False, _LINE
        elif mark == "," and self._in_array and self._depth == 1:
            data[at] = _LINE
        elif mark == "\n" and self._depth:
            data[at] = _RETURN


def _end_of(found: re.Match[bytes] | None) -> int:
    assert found is not None  # the pattern takes nothing too
    return found.end()
