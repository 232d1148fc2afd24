"""JSONL and text, line by line, plain or compressed, whole or by byte range.

A piece of a plain file is a byte range and owns the lines that start in it, so pieces can be read by
different processes and every line is read once.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from stoker.formats.zstd import zstd_module
from stoker.prepare.sources.arrays import Unfolded
from stoker.prepare.sources.documents import BLOCK_BYTES, BadRecord, Documents, Piece, Reading, Source
from stoker.prepare.sources.jsonl import extract, line_starts, parse
from stoker.prepare.sources.records import NoText, wanted
from stoker.storage import open_store, split_url

BOM = b"\xef\xbb\xbf"  # how some programs begin a UTF-8 file: no part of its text


def read_jsonl(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The text field of each line."""
    for lines in line_blocks(source, piece, reading):
        if wanted(reading).plain:
            texts, places, odd = extract(lines.data, reading.field)
            plain = Documents(texts=texts, places=places + lines.start, bad=lines.bad)
        else:
            plain, odd = Documents(bad=lines.bad), line_starts(lines.data)
        yield _with_odd_lines(source, reading, lines, plain, odd) if odd else plain


def read_text_lines(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """Each line that is not blank."""
    for lines in line_blocks(source, piece, reading):
        documents: dict[int, bytes] = {}
        bad = list(lines.bad)
        at = lines.start
        for line in bytes(lines.data).split(b"\n"):
            try:
                if str(line, "utf-8").strip():
                    documents[at] = line.removesuffix(b"\r")
            except UnicodeDecodeError as error:
                bad.append(_not_utf8(source, at, error))
            at += len(line) + 1
        yield Documents.of(list(documents.values()), list(documents), bad)


@contextmanager
def open_plain(source: Source) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a source. Neither decompressor closes the file it was given."""
    folder, name = split_url(source.url)
    with open_store(folder).open(name) as file:
        if source.compression == "gz":
            with io.BufferedReader(gzip.GzipFile(fileobj=file)) as plain:
                yield plain
        elif source.compression == "zst":
            with zstd_module().ZstdFile(file, options=_long_windows()) as plain:
                yield plain
        elif source.compression in ("xz", "bz2"):
            unpack = lzma.LZMAFile if source.compression == "xz" else _Bz2File
            with io.BufferedReader(unpack(file)) as plain:
                yield plain
        else:
            yield file


class _Bz2File(bz2.BZ2File):
    """bz2 calls damage an OSError, which is what a disk's troubles are called."""

    def readinto(self, buffer: Any) -> int:  # a writable buffer
        with _damage_told():
            return super().readinto(buffer)

    def read1(self, size: int = -1) -> bytes:
        with _damage_told():
            return super().read1(size)


@contextmanager
def _damage_told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise EOFError(str(error)) from error
        raise


def _long_windows() -> dict[int, int]:
    """Large dumps are often packed with `zstd --long=31`, which a reader refuses unless it is told to."""
    return {zstd_module().DecompressionParameter.window_log_max: 31}


def decompression_errors() -> tuple[type[Exception], ...]:
    """What a damaged compressed file raises while it is read."""
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError)
    try:
        return (*errors, zstd_module().ZstdError)
    except Exception:  # zstd is optional; without it no zstd file was opened
        return errors


_COMPRESSED_STEP = 128 << 10


def _filled(file: Any, room: memoryview) -> tuple[int, Exception | None]:
    """(bytes put into the room, the damage that ended it). Each read takes what one step of the decompressor
    gives: a longer one would lose with the damage what was readable before it."""
    count = 0
    try:
        while count < len(room) and (more := file.readinto1(room[count:])):
            count += more
    except decompression_errors() as error:
        return count, error
    return count, None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """Whole lines, where they start in the source, and what before them was no line. The data is a
    view of a buffer that the next block overwrites."""

    start: int
    data: memoryview
    bad: list[BadRecord]


def line_blocks(source: Source, piece: Piece, reading: Reading) -> Iterator[_Lines]:
    """Blocks of the lines that start inside the piece, without those over the limit."""
    limit = reading.max_document_bytes
    for lines in _whole_lines(source, piece, limit):
        if lines.start == 0 and bytes(lines.data[: len(BOM)]) == BOM:
            lines = replace(lines, start=len(BOM), data=lines.data[len(BOM) :])
        if len(lines.data) <= limit:
            yield lines
        else:
            yield from _without_long_lines(source, lines, limit)


def _whole_lines(source: Source, piece: Piece, limit: int) -> Iterator[_Lines]:
    """Blocks of lines as they stand; one that does not fit memory is passed over here."""
    streamed = bool(source.compression) or source.kind == "json"
    stop = None if streamed else piece.stop
    step = _COMPRESSED_STEP if streamed else None
    damage: Exception | None = None
    with open_plain(source) as opened:
        file: Any = opened.raw if source.compression and isinstance(opened, io.BufferedReader) else opened
        file = Unfolded(file) if source.kind == "json" else file
        at = _first_line(file, piece.start)
        buffer, held = bytearray(BLOCK_BYTES), 0
        while stop is None or at < stop:
            if damage:
                yield _no_lines(at, _bad(source, at + held, "truncated", f"the file is damaged: {damage}"))
                return
            room = memoryview(buffer)[held : held + step if step else None]
            count, damage = _filled(file, room) if step else (file.readinto(room), None)
            if damage and not count:
                continue
            filled = held + count
            end = buffer.rfind(b"\n", 0, filled) + 1 if count else filled
            if end:
                if stop is not None and at + end > stop:
                    cut = buffer.find(b"\n", max(0, stop - at - 1), filled) + 1
                    yield _Lines(start=at, data=memoryview(buffer)[: cut or end], bad=[])
                    if cut:
                        return
                else:
                    yield _Lines(start=at, data=memoryview(buffer)[:end], bad=[])
                buffer[: filled - end] = buffer[end:filled]
                at, held = at + end, filled - end
            elif not count:
                return
            elif filled <= limit:
                held = filled
                if filled == len(buffer):
                    buffer = buffer + bytearray(len(buffer))
            else:
                passed = filled + _skip_line(file)
                yield _too_long(source, at, passed, limit)
                at, held = at + passed, 0


def _without_long_lines(source: Source, lines: _Lines, limit: int) -> Iterator[_Lines]:
    newlines = np.flatnonzero(np.frombuffer(lines.data, np.uint8) == ord("\n"))
    starts = np.concatenate([[0], newlines + 1])
    sizes = np.concatenate([newlines, [len(lines.data)]]) - starts
    done = 0
    for start, size in zip(starts[sizes > limit].tolist(), sizes[sizes > limit].tolist(), strict=True):
        yield _Lines(start=lines.start + done, data=lines.data[done:start], bad=[])
        yield _too_long(source, lines.start + start, size, limit)
        done = start + size + 1
    yield _Lines(start=lines.start + done, data=lines.data[done:], bad=lines.bad)


def _too_long(source: Source, at: int, size: int, limit: int) -> _Lines:
    return _no_lines(at, _bad(source, at, "too_long", f"a line of {size:,} bytes; the limit is {limit:,}"))


def _no_lines(at: int, bad: BadRecord) -> _Lines:
    return _Lines(start=at, data=memoryview(b""), bad=[bad])


def _first_line(file: BinaryIO, start: int) -> int:
    """Move to the first line that starts at or after `start`; returns where that is."""
    if not start:
        return 0
    file.seek(start - 1)
    return start - 1 + _skip_line(file)


def _skip_line(file: BinaryIO) -> int:
    """Read past the next newline, holding little in memory; returns the bytes passed."""
    passed = 0
    while part := file.readline(BLOCK_BYTES):
        passed += len(part)
        if part.endswith(b"\n"):
            break
    return passed


def _with_odd_lines(
    source: Source, reading: Reading, lines: _Lines, plain: Documents, odd: list[int]
) -> Documents:
    """Parse the lines the fast parser left out, one by one, and put them in their places."""
    texts: list[str] = []
    places: list[int] = []
    bad = list(plain.bad)
    block, text = bytes(lines.data), wanted(reading)
    for start in odd:
        line = block[start : (block.find(b"\n", start) + 1 or len(block) + 1) - 1]
        try:
            texts.append(text.text(parse(line)))
            places.append(lines.start + start)
        except (ValueError, NoText) as error:
            bad.append(_explain(source, lines.start + start, line, error))
    if not texts:
        return Documents(texts=plain.texts, places=plain.places, bad=bad)
    both = Documents.join([plain, Documents.of(texts, places)])
    order = np.argsort(both.places).tolist()
    views = both.texts.views()
    return Documents.of([bytes(views[row]) for row in order], both.places[order].tolist(), bad)


def _explain(source: Source, place: int, line: bytes, error: Exception) -> BadRecord:
    try:
        line.decode()
    except UnicodeDecodeError as reason:
        return _not_utf8(source, place, reason)
    if isinstance(error, NoText):
        return _bad(source, place, error.reason, error.detail)
    return _bad(source, place, "invalid_json", str(error))


def _not_utf8(source: Source, place: int, error: UnicodeDecodeError) -> BadRecord:
    return _bad(source, place, "invalid_utf8", f"{error.reason} at byte {place + error.start:,}")


def _bad(source: Source, place: int, reason: str, detail: str) -> BadRecord:
    return BadRecord(where=f"{source.url} at byte {place:,}", reason=reason, detail=detail)
