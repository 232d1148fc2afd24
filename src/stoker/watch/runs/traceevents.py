"""Chrome trace events (what Kineto writes), read one by one: a file of gigabytes needs memory for one piece.

The file is one JSON object whose "traceEvents" is a list, or that list alone; gzipped or not. What is torn,
or no trace, is refused with the place where it breaks off.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from stoker.errors import UnreadableError

Line = dict[str, Any]  # one JSON object, as it was read
_PIECE = 4 << 20  # characters
_LONGEST = 4 << 20  # of one value: what is no JSON after so many will not be after more
_SPACE = " \t\r\n"
_EVENTS = "traceEvents"
_HINT = "was the profiler stopped before it had written the file? export it again (export_chrome_trace)"
# What json itself calls; raw_decode, around it, would cost a third more for each event.
_scan: Callable[[str, int], tuple[Any, int]] = vars(json.JSONDecoder())["scan_once"]


def is_trace(path: Path) -> bool:
    """Does the file look like a trace? Its beginning tells: a recording of ours is JSON lines, not zipped."""
    if path.name.endswith(".json.gz"):
        return True
    try:
        with _opened(path) as file:
            head = file.read(4096).lstrip(_SPACE)
    except (OSError, EOFError, zlib.error):
        return _named_like_one(path)
    if head.startswith("["):
        return head[1:].lstrip(_SPACE)[:1] in ("{", "]", "")
    # A recording's first line is whole: an object that goes on after it is something else.
    return head.startswith("{") and ('"schemaVersion"' in head or f'"{_EVENTS}"' in head)


def read_events(path: Path, *, facts: Line) -> Iterator[Line]:
    """Every event of a trace; what else the file says is put into `facts`, all of it once this is used up."""
    try:
        with _opened(path) as file:
            text = _Text(path, file)
            found = False
            if text.peek() == "[":
                yield from text.listed()
                return
            for name in text.names():
                if name == _EVENTS:
                    found = True
                    yield from text.listed()
                else:
                    facts[name] = text.value()
    except (OSError, EOFError, zlib.error) as error:
        raise UnreadableError(f"{path} cannot be read: {error}", hint=_HINT) from error
    if not found:
        raise UnreadableError(f"{path} holds no {_EVENTS}", hint="give a trace that torch.profiler exported")


def _opened(path: Path) -> io.TextIOWrapper:
    """As text. Names of kernels may be cut in the middle of a character: that is no reason to fail."""
    with path.open("rb") as raw:
        zipped = raw.read(2) == b"\x1f\x8b"
    file = gzip.open(path, "rb") if zipped else path.open("rb")  # noqa: SIM115  # whoever asked closes it
    return io.TextIOWrapper(file, "utf-8-sig", errors="replace")


def _named_like_one(path: Path) -> bool:
    return path.name.endswith((".json", ".json.gz"))


class _Text:
    """A window of a JSON text that moves forward."""

    def __init__(self, path: Path, file: io.TextIOWrapper) -> None:
        self._path, self._file = path, file
        self._text, self._at, self._before = "", 0, 0
        self._more()

    def peek(self) -> str:
        """The next character that is no space; "" at the end."""
        while True:
            text, at = self._text, self._at
            while at < len(text) and text[at] in _SPACE:
                at += 1
            self._at = at
            if at < len(text) or not self._more():
                return text[at : at + 1] if at < len(text) else ""

    def names(self) -> Iterator[str]:
        """The names of an object; each value is read by whoever asks, before the next name."""
        self._expect("{")
        while self.peek() != "}":
            name = self.value()
            self._expect(":")
            if not isinstance(name, str):
                raise self._broken()
            yield name
            if self.peek() != "}":
                self._expect(",")
        self._at += 1

    def listed(self) -> Iterator[Line]:
        """The objects of a list."""
        self._expect("[")
        while self.peek() != "]":
            one = self.value()
            if isinstance(one, dict):
                yield one
            if self.peek() != "]":
                self._expect(",")
        self._at += 1

    def value(self) -> Any:
        """The next value, whatever it is."""
        self.peek()
        tried = -1
        while True:
            try:
                found, end = _scan(self._text, self._at)
            except (StopIteration, json.JSONDecodeError, RecursionError) as error:
                # Either the piece ends in the middle of the value, or it is no JSON: another piece tells.
                place = self._before + (error.pos if isinstance(error, json.JSONDecodeError) else self._at)
                if (place == tried and len(self._text) > _LONGEST) or not self._more():
                    raise self._broken() from error
                tried = place
                continue
            # A number at the end of the piece may go on in the next one.
            if end == len(self._text) and not isinstance(found, (dict, list, str)) and self._more():
                continue
            self._at = end
            return found

    def _expect(self, sign: str) -> None:
        if self.peek() != sign:
            raise self._broken()
        self._at += 1

    def _more(self) -> bool:
        """Read on, and forget what is behind us."""
        piece = self._file.read(_PIECE)
        self._before += self._at
        self._text, self._at = self._text[self._at :] + piece, 0
        return bool(piece)

    def _broken(self) -> UnreadableError:
        place = self._before + self._at
        if self.peek() == "" or not self._file.read(1):
            return UnreadableError(f"{self._path} breaks off after {place:,} characters", hint=_HINT)
        return UnreadableError(f"{self._path} is no JSON at character {place:,}", hint=_HINT)
