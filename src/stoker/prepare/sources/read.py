"""Reader dispatch: any piece of any source by its kind; whole files and tars are read here."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby

from stoker.errors import ChangedError, require
from stoker.prepare.sources.documents import BadRecord, Documents, Piece, Reading, Source
from stoker.prepare.sources.lines import BOM, decompression_errors, open_plain, read_jsonl, read_text_lines
from stoker.prepare.sources.tables import read_dataset, read_table
from stoker.storage import open_store, split_url

Reader = Callable[[Source, Piece, Reading], Iterator[Documents]]


def read_piece(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The documents of one piece, block by block; what is no document is reported beside them."""
    readers: dict[str, Reader] = {
        "jsonl": read_jsonl,
        "text": read_text_lines if reading.lines else _read_whole,
        "parquet": read_table,
        "arrow": read_table,
        "saved": read_dataset,
        "hub": read_dataset,
        "webdataset": _read_tar,
    }
    yield from readers[source.kind](source, piece, reading)
    if source.kind not in ("saved", "hub"):
        _check_unchanged(source)


def _check_unchanged(source: Source) -> None:
    """Pieces were cut of the file as the plan saw it: of another one lines would be lost or read twice."""
    folder, name = split_url(source.url)
    found = open_store(folder).stat(name)
    if (found.bytes, found.version) != (source.bytes, source.version):
        raise ChangedError(
            f"{source.url} changed after this run was planned: it was {source.bytes:,} bytes of version"
            f" {source.version}, now it is {found.bytes:,} of {found.version}",
            hint="once nobody writes to it, run the same command again: it plans anew",
        )


def _read_whole(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """A text file is one document."""
    with open_plain(source) as file:
        try:
            data = file.read(reading.max_document_bytes + 1)
        except decompression_errors() as error:
            yield _only_bad(source.url, "truncated", f"the file is damaged: {error}")
            return
    yield _document(source.url, data, place=0, reading=reading)


def _read_tar(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """Of each sample of a WebDataset tar, its text: a `.txt` member, or the field of a `.json` one."""
    damaged: tuple[type[Exception], ...] = (tarfile.TarError, *decompression_errors())
    try:
        with open_plain(source) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for _, members in groupby(_text_members(archive, reading), key=lambda member: member.sample):
                yield _member_document(source, min(members, key=lambda member: member.rank), reading)
            # tarfile takes a cut-off archive for a short one: a whole one ends with an empty block
            if archive.fileobj.tell() == archive.offset:
                yield _only_bad(source.url, "truncated", "the tar is cut short between two members")
    except damaged as error:
        yield _only_bad(source.url, "truncated", f"the tar is damaged: {error}")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A member that may hold its sample's text; the lowest rank does."""

    name: str
    sample: str
    rank: int
    place: int
    data: bytes


def _text_members(archive: tarfile.TarFile, reading: Reading) -> Iterator[_Member]:
    suffixes = _text_suffixes(reading.field)
    for place, member in enumerate(archive):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        if member.isfile() and stem and suffix in suffixes:
            content = archive.extractfile(member)
            yield _Member(
                name=member.name,
                sample=f"{folder}/{stem}",
                rank=suffixes.index(suffix),
                place=place,
                data=content.read(reading.max_document_bytes + 1) if content else b"",
            )


def _member_document(source: Source, member: _Member, reading: Reading) -> Documents:
    read = _json_document if member.name.endswith(".json") else _document
    return read(f"{source.url} member {member.name}", member.data, place=member.place, reading=reading)


def _text_suffixes(field: str) -> tuple[str, ...]:
    return ("txt", f"{field}.txt", field, "json")


def _json_document(where: str, data: bytes, *, place: int, reading: Reading) -> Documents:
    if len(data) > reading.max_document_bytes:
        return _too_long(where, reading)
    try:
        text = require("orjson", extra="tokens").loads(data.removeprefix(BOM))[reading.field]
    except ValueError as error:
        return _only_bad(where, "invalid_json", str(error))
    except (KeyError, TypeError):
        return _only_bad(where, "missing_field", f"it has no field {reading.field!r}")
    if not isinstance(text, str):
        return _only_bad(where, "not_text", f"{reading.field} is {type(text).__name__}, not a string")
    return Documents.of([text], [place])


def _document(where: str, data: bytes, *, place: int, reading: Reading) -> Documents:
    if len(data) > reading.max_document_bytes:
        return _too_long(where, reading)
    try:
        return Documents.of([data.removeprefix(BOM).decode()], [place])
    except UnicodeDecodeError as error:
        return _only_bad(f"{where} at byte {error.start:,}", "invalid_utf8", error.reason)


def _too_long(where: str, reading: Reading) -> Documents:
    return _only_bad(where, "too_long", f"longer than the limit of {reading.max_document_bytes:,} bytes")


def _only_bad(where: str, reason: str, detail: str) -> Documents:
    return Documents(bad=[BadRecord(where=where, reason=reason, detail=detail)])
