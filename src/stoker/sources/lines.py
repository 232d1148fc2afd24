"""Line-wise sources: JSONL and text, plain or compressed, whole or by byte range.

A piece of a plain file is a byte range and owns the lines that start in it, so pieces can be read by
different processes and every line is read once.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, BinaryIO

from stoker.errors import require
from stoker.formats.zstd import zstd_module
from stoker.sources.documents import BLOCK_BYTES, BadRecord, Documents, Piece, Reading, Source
from stoker.storage import open_store, split_url

Parse = Callable[[list[bytes]], list[str]]


def read_jsonl(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The text field of each line."""
    loads, field = require("orjson", extra="tokens").loads, reading.field

    def parse(lines: list[bytes]) -> list[str]:
        texts = [loads(line)[field] for line in lines]
        if set(map(type, texts)) - {str}:
            raise TypeError
        return texts

    return _read(source, piece, reading, parse)


def read_text_lines(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """Each line."""
    return _read(source, piece, reading, lambda lines: [str(line, "utf-8") for line in lines])


@contextmanager
def open_plain(source: Source) -> Iterator[BinaryIO]:
    """The uncompressed bytes of a source. Neither decompressor closes the file it was given."""
    folder, name = split_url(source.url)
    with open_store(folder).open(name) as file:
        if source.compression == "gz":
            with gzip.GzipFile(fileobj=file) as plain:
                yield plain  # type: ignore[misc]
        elif source.compression == "zst":
            with zstd_module().ZstdFile(file) as plain:
                yield plain
        else:
            yield file


def decompression_errors() -> tuple[type[Exception], ...]:
    """What a damaged compressed file raises while it is read."""
    errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    try:
        return (*errors, zstd_module().ZstdError)
    except Exception:  # zstd is optional; without it no zstd file was opened
        return errors


def _read(source: Source, piece: Piece, reading: Reading, parse: Parse) -> Iterator[Documents]:
    with open_plain(source) as file:
        for start, lines, bad in _line_blocks(file, source, piece, reading):
            places = list(accumulate(map(_line_bytes, lines), initial=start))
            yield _parse_block(source, lines, places, parse, bad)


def _line_bytes(line: bytes) -> int:
    return len(line) + 1


def _line_blocks(
    file: BinaryIO, source: Source, piece: Piece, reading: Reading
) -> Iterator[tuple[int, list[bytes], list[BadRecord]]]:
    """(offset of the first line, lines, what was no line) until the first line past the piece."""
    stop = None if source.compression else piece.stop
    at, rest = _first_line(file, piece.start), b""
    while stop is None or at < stop:
        try:
            block = file.read(BLOCK_BYTES)
        except decompression_errors() as error:
            yield at, [], [_bad(source, at + len(rest), "truncated", f"the file is damaged: {error}")]
            return
        whole = rest + block if rest else block
        end = whole.rfind(b"\n") + 1 if block else len(whole)
        if not whole:
            return
        if not end:
            if len(whole) <= reading.max_document_bytes:
                rest = whole
                continue
            skipped = _skip_line(file)
            detail = f"a line of {len(whole) + skipped:,} bytes; the limit is {reading.max_document_bytes:,}"
            yield at, [], [_bad(source, at, "too_long", detail)]
            at, rest = at + len(whole) + skipped, b""
            continue
        lines = whole[:end].split(b"\n")
        if whole.endswith(b"\n", 0, end):
            lines.pop()
        if stop is not None and at + end > stop:
            lines = _starting_before(lines, stop - at)
        yield at, lines, []
        at, rest = at + end, whole[end:]


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


def _starting_before(lines: list[bytes], limit: int) -> list[bytes]:
    starts = accumulate(map(_line_bytes, lines), initial=0)
    return [line for line, start in zip(lines, starts, strict=False) if start < limit]


def _parse_block(
    source: Source, lines: list[bytes], places: list[int], parse: Parse, bad: list[BadRecord]
) -> Documents:
    try:
        return Documents(texts=parse(lines), places=places[: len(lines)], bad=bad)
    except (ValueError, KeyError, TypeError):
        return _parse_one_by_one(source, lines, places, parse, bad)


def _parse_one_by_one(
    source: Source, lines: list[bytes], places: list[int], parse: Parse, bad: list[BadRecord]
) -> Documents:
    """The slow road, taken by a block that holds an empty or a bad line."""
    texts, kept = [], []
    for line, place in zip(lines, places, strict=False):
        try:
            texts += parse([line])
            kept.append(place)
        except (ValueError, KeyError, TypeError) as error:
            if line.strip():
                bad.append(_explain(source, place, line, error))
    return Documents(texts=texts, places=kept, bad=bad)


def _explain(source: Source, place: int, line: bytes, error: Exception) -> BadRecord:
    try:
        line.decode()
    except UnicodeDecodeError as reason:
        return _bad(source, place, "invalid_utf8", f"{reason.reason} at byte {place + reason.start:,}")
    if isinstance(error, KeyError):
        return _bad(source, place, "missing_field", f"the record has no field {error}")
    if isinstance(error, TypeError):
        return _bad(source, place, "not_text", "the field is not a string, or the record is no object")
    return _bad(source, place, "invalid_json", str(error))


def _bad(source: Source, place: int, reason: str, detail: Any) -> BadRecord:
    return BadRecord(where=f"{source.url} at byte {place:,}", reason=reason, detail=str(detail))
