"""Common Crawl's WARC and WET: text of each record; each usually lies in a gzip member of its own.

Of WET files the `conversion` records are documents as they are. Of WARC files `response` records that hold
HTML are, their main text taken out by trafilatura; plain text is taken as it is, other kinds are passed over.
Behind damage the next record is looked for, by its gzip header or its first line.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from stoker.errors import require
from stoker.prepare.sources.documents import BLOCK_BYTES, BadRecord, Documents, Piece, Reading, Source
from stoker.prepare.sources.lines import decompression_errors, open_plain
from stoker.storage import open_store, split_url

_STEP = 64 << 10
_MEMBER, _FIRST = b"\x1f\x8b\x08", b"WARC/"
_HEADER_BYTES = 256 << 10
_HTML = ("text/html", "application/xhtml+xml")


def read_warc(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The text of each record that has one; its place is its number in the file."""
    texts: list[str] = []
    places: list[int] = []
    bad: list[BadRecord] = []
    size = 0
    for number, record in enumerate(_records(source, reading.max_document_bytes)):
        where = f"{source.url} record {number:,}"
        if record.fault:
            bad.append(BadRecord(where=where, reason=record.fault, detail=record.detail))
            continue
        try:
            text = _text(record)
        except UnicodeDecodeError as error:
            detail = f"{error.reason} at byte {error.start:,} of the record"
            bad.append(BadRecord(where=where, reason="invalid_utf8", detail=detail))
            continue
        if text is not None:
            texts.append(text)
            places.append(number)
            size += len(text)
        if size > BLOCK_BYTES // 4:
            yield Documents.of(texts, places, bad)
            texts, places, bad, size = [], [], [], 0
    yield Documents.of(texts, places, bad)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """A record: what its header says, and its content; or why there is none."""

    names: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    fault: str = ""
    detail: str = ""


class _Damage(Exception):
    """The bytes are not what a WARC file holds."""


def _records(source: Source, limit: int) -> Iterator[_Record]:
    with _opened(source) as feed:
        while True:
            try:
                record = _next(feed, limit)
            except _Damage as error:
                yield _Record(fault="truncated", detail=f"the file is damaged: {error}")
                if not feed.resume():
                    return
                continue
            if record is None:
                return
            yield record


def _next(feed: _Feed, limit: int) -> _Record | None:
    header = feed.header()
    if header is None:
        return None
    first, *lines = header.decode("utf-8", "replace").split("\r\n")
    if not first.startswith("WARC/"):
        raise _Damage(f"a record begins with {first[:40]!r}")
    names = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    if not names.get("content-length", "").isdecimal():
        raise _Damage("a record does not say how long it is")
    length = int(names["content-length"])
    if length > limit:
        feed.skip(length)
        feed.settle()
        return _Record(fault="too_long", detail=f"a record of {length:,} bytes; the limit is {limit:,}")
    content = feed.take(length)
    feed.settle()
    return _Record(names=names, content=content)


def _text(record: _Record) -> str | None:
    """The text of a record; None for what holds none: requests, robots.txt, pictures, the file's facts."""
    kind = record.names.get("warc-type", "")
    if kind == "conversion":
        return record.content.decode()
    if kind != "response":
        return None
    head, _, body = record.content.partition(b"\r\n\r\n")
    media = next(
        (
            value.strip().lower()
            for name, _, value in (line.partition(b":") for line in head.split(b"\r\n"))
            if name.strip().lower() == b"content-type"
        ),
        b"",
    ).decode("latin-1")
    if media.startswith(_HTML):
        found = require("trafilatura", extra="warc").extract(
            body, include_comments=False, favor_precision=True, deduplicate=False
        )
        return str(found or "")
    return body.decode() if media.startswith("text/plain") else None


def _opened(source: Source) -> _Feed:
    return _Members(source) if source.compression == "gz" else _Stream(source)


class _Feed:
    """Bytes of a file, unpacked, with the next record at their start."""

    def __init__(self) -> None:
        self._held = bytearray()

    def __enter__(self) -> _Feed:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        raise NotImplementedError

    def more(self) -> bytes:
        """The next bytes, none at the end; _Damage where they are not what was written."""
        raise NotImplementedError

    def settle(self) -> None:
        """Raise _Damage if the record just taken turns out to be damaged at its end."""

    def resume(self) -> bool:
        """Go on with the first record behind the damage, if there is one."""
        raise NotImplementedError

    def header(self) -> bytes | None:
        """The lines before a record's content; None at the end of the file."""
        while True:
            if self._held.startswith((b"\r", b"\n")):  # two empty lines end a record
                del self._held[: len(self._held) - len(self._held.lstrip(b"\r\n"))]
            end = self._held.find(b"\r\n\r\n")
            if end >= 0:
                header = bytes(self._held[:end])
                del self._held[: end + 4]
                return header
            if len(self._held) > _HEADER_BYTES:
                raise _Damage("a record has no end of its header")
            found = self.more()
            if not found and not self._held:
                return None
            if not found:
                raise _Damage("it ends in the header of a record")
            self._held += found

    def take(self, length: int) -> bytes:
        while len(self._held) < length:
            found = self.more()
            if not found:
                raise _Damage("it ends in the middle of a record")
            self._held += found
        content = bytes(self._held[:length])
        del self._held[:length]
        return content

    def skip(self, length: int) -> None:
        while length:
            step = min(length, _STEP)
            self.take(step)
            length -= step


class _Stream(_Feed):
    """A file in one stream, plain or compressed as a whole."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self._open = open_plain(source)
        self._file: Any = None
        self._is_over = False

    def __enter__(self) -> _Stream:
        self._file = self._open.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.__exit__(None, None, None)

    def more(self) -> bytes:
        if self._is_over:
            return b""
        try:
            return bytes(self._file.read(_STEP))
        except decompression_errors() as error:
            self._is_over = True
            raise _Damage(str(error)) from error

    def resume(self) -> bool:
        while True:
            at = self._held.find(b"\n" + _FIRST)
            if at >= 0:
                del self._held[: at + 1]
                return True
            del self._held[: max(0, len(self._held) - len(_FIRST))]
            try:
                found = self.more()
            except _Damage:
                return False
            if not found:
                return False
            self._held += found


class _Members(_Feed):
    """Gzip members one after another; damage in one leaves the others whole."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        folder, name = split_url(source.url)
        self._file: Any = open_store(folder).open(name)
        self._raw = b""  # read from the file, not unpacked yet
        self._start = 0  # of the member in hand
        self._at = 0  # of the raw bytes
        self._unpack: Any = None

    def __enter__(self) -> _Members:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def more(self) -> bytes:
        while self._has_raw():
            if found := self._step():
                return found
        if self._unpack is None:
            return b""
        self._unpack = None
        raise _Damage("it ends in the middle of a gzip member")

    def settle(self) -> None:
        while self._unpack is not None and not self._held:
            if not self._has_raw():
                self._unpack = None
                raise _Damage("it ends in the middle of a gzip member")
            self._held += self._step()

    def _has_raw(self) -> bool:
        self._raw = self._raw or self._file.read(_STEP)
        return bool(self._raw)

    def _step(self) -> bytes:
        """Unpack some of the raw bytes, of one member; at its end zlib checks its sum."""
        if self._unpack is None:
            self._start, self._unpack = self._at, zlib.decompressobj(31)
        given = self._raw
        try:
            found = bytes(self._unpack.decompress(given, _STEP))
        except zlib.error as error:
            raise _Damage(str(error)) from error
        self._raw = self._unpack.unused_data or self._unpack.unconsumed_tail
        self._at += len(given) - len(self._raw)
        if self._unpack.eof:
            self._unpack = None
        return found

    def resume(self) -> bool:
        self._held.clear()
        at = self._start + 1
        while (at := self._find_member(at)) >= 0:
            self._file.seek(at)
            self._raw, self._at, self._unpack = b"", at, None
            try:
                head = self.more()
            except _Damage:
                at += 1
                continue
            if head.startswith(_FIRST):
                self._held += head
                return True
            at += 1
        return False

    def _find_member(self, at: int) -> int:
        """Where the next gzip header stands, -1 if nowhere."""
        self._file.seek(at)
        held = b""
        while found := self._file.read(_STEP):
            held += found
            place = held.find(_MEMBER)
            if place >= 0:
                return int(at + place)
            kept = held[-len(_MEMBER) + 1 :]
            at += len(held) - len(kept)
            held = kept
        return -1
