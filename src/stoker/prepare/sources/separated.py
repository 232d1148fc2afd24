"""CSV and TSV: a document a row, named by the first line; quoted fields may hold lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator

from stoker.errors import BadInputError
from stoker.prepare.sources.documents import BadRecord, Documents, Piece, Reading, Source
from stoker.prepare.sources.lines import line_blocks
from stoker.prepare.sources.records import NoText, wanted

_DELIMITERS = {"csv": ",", "tsv": "\t"}
_ROWS = 1024  # per block


def read_separated(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The text of each row. A row that is no row of this file is reported with its number."""
    bad: list[BadRecord] = []
    csv.field_size_limit(reading.max_document_bytes)  # the parser has one for the whole process
    rows = csv.reader(_lines(source, reading, bad), delimiter=_DELIMITERS[source.kind], strict=True)
    text = wanted(reading)
    header: list[str] = []
    texts: list[str] = []
    places: list[int] = []
    number = -1
    while True:
        number += 1
        try:
            row = next(rows)
        except StopIteration:
            break
        except csv.Error as error:
            bad.append(_bad(source, number, "invalid_csv", str(error)))
            continue
        if not row:
            continue
        if not header:
            header = _checked(source, reading, row)
            continue
        if len(row) != len(header):
            detail = f"{len(row)} fields, the first line names {len(header)}"
            bad.append(_bad(source, number, "invalid_csv", detail))
            continue
        try:
            texts.append(text.text(dict(zip(header, row, strict=True))))
            places.append(number)
        except NoText as error:
            bad.append(_bad(source, number, error.reason, error.detail))
        if len(texts) == _ROWS:
            yield Documents.of(texts, places, bad)
            texts, places = [], []
            bad.clear()
    yield Documents.of(texts, places, bad)


def _lines(source: Source, reading: Reading, bad: list[BadRecord]) -> Iterator[str]:
    """The lines as text; bytes that are no UTF-8 are told by whoever takes the field they stand in."""
    for lines in line_blocks(source, Piece(source=0, start=0, stop=source.bytes), reading):
        bad += lines.bad
        yield from _cut(bytes(lines.data).decode("utf-8", "surrogateescape"))


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = text.find("\n", start) + 1 or len(text)
        yield text[start:stop]
        start = stop


def _checked(source: Source, reading: Reading, header: list[str]) -> list[str]:
    try:
        wanted(reading).columns(header)
    except KeyError as error:
        raise BadInputError(
            f"{source.url} has no column {error.args[0]!r}: its first line names {', '.join(header[:20])}",
            hint="name the column that holds the text with --field, or several with --template; a file"
            " without a line of names needs one",
        ) from error
    return header


def _bad(source: Source, number: int, reason: str, detail: str) -> BadRecord:
    return BadRecord(where=f"{source.url} row {number:,}", reason=reason, detail=detail)
