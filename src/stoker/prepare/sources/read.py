"""Reader dispatch: any piece of any source by its kind; whole files and tars are read here."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from stoker.errors import ChangedError
from stoker.prepare.sources.documents import BadRecord, Documents, Piece, Reading, Source
from stoker.prepare.sources.jsonl import parse
from stoker.prepare.sources.lines import BOM, decompression_errors, open_plain, read_jsonl, read_text_lines
from stoker.prepare.sources.records import NoText, wanted
from stoker.prepare.sources.separated import read_separated
from stoker.prepare.sources.tables import read_dataset, read_table
from stoker.prepare.sources.warc import read_warc
from stoker.storage import open_store, split_url

Reader = Callable[[Source, Piece, Reading], Iterator[Documents]]


def read_piece(source: Source, piece: Piece, reading: Reading) -> Iterator[Documents]:
    """The documents of one piece, block by block; what is no document is reported beside them."""
    reading = own_reading(source, reading)
    readers: dict[str, Reader] = {
        "jsonl": read_jsonl,
        "json": read_jsonl,
        "csv": read_separated,
        "tsv": read_separated,
        "warc": read_warc,
        "text": read_text_lines if reading.lines else _read_whole,
        "parquet": read_table,
        "arrow": read_table,
        "saved": read_dataset,
        "hub": read_dataset,
        "webdataset": _read_tar,
    }
    yield from readers[source.kind](source, piece, reading)
    if source.kind not in ("saved", "hub"):
        check_unchanged(source)


def own_reading(source: Source, reading: Reading) -> Reading:
    """How this source is read, which may have a field or template of its own."""
    if source.template:
        return replace(reading, template=source.template, chat="")
    return replace(reading, field=source.field, template="", chat="") if source.field else reading


def check_unchanged(source: Source) -> None:
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
    """Of each sample of a WebDataset tar, its text: a `.txt` member, or the field of a `.json` one. Behind a
    damaged header the next sound one is looked for."""
    seen, bad = _Seen(), None
    try:
        yield from _tar_documents(source, reading, seen, through_damage=False)
    except tarfile.TarError as error:
        bad = f"the tar is damaged: {error}"
    except decompression_errors() as error:
        yield _only_bad(source.url, "truncated", f"the tar is damaged: {error}")
    if bad:
        yield _only_bad(f"{source.url} after byte {seen.offset:,}", "truncated", bad)
        with suppress(tarfile.TarError, *decompression_errors()):
            yield from _tar_documents(source, reading, seen, through_damage=True)


class StrictHeader(tarfile.TarInfo):
    """tarfile takes a damaged header, unless it is the first, for the end of the archive."""

    @classmethod
    def fromtarfile(cls, tarfile_: tarfile.TarFile) -> StrictHeader:
        try:
            return super().fromtarfile(tarfile_)
        except tarfile.HeaderError as error:
            if type(error).__name__ == "InvalidHeaderError":
                raise tarfile.ReadError(f"{error} at byte {tarfile_.offset:,}") from error
            raise


@dataclass(slots=True)
class _Seen:
    """How far a tar has been read."""

    offset: int = -1


def _tar_documents(
    source: Source, reading: Reading, seen: _Seen, *, through_damage: bool
) -> Iterator[Documents]:
    with (
        open_plain(source) as file,
        tarfile.open(
            fileobj=file,
            mode="r|",
            ignore_zeros=through_damage,
            tarinfo=tarfile.TarInfo if through_damage else StrictHeader,
        ) as archive,
    ):
        members = _text_members(archive, reading, after=seen.offset)
        for _, group in groupby(members, key=lambda member: member.sample):
            sample = list(group)
            chosen = min(sample, key=lambda member: member.rank)
            yield _member_document(source, chosen, reading)
            seen.offset = max(member.offset for member in sample)
        # tarfile takes a cut-off archive for a short one: a whole one ends with an empty block
        if not through_damage and archive.fileobj.tell() == archive.offset:
            yield _only_bad(source.url, "truncated", "the tar is cut short between two members")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    """A member that may hold its sample's text; the lowest rank does. What is no file has no data."""

    name: str
    sample: str
    rank: int
    place: int
    offset: int
    data: bytes | None


def _text_members(archive: tarfile.TarFile, reading: Reading, *, after: int) -> Iterator[_Member]:
    suffixes = _text_suffixes(reading)
    for place, member in enumerate(archive):
        folder, _, base = member.name.rpartition("/")
        stem, _, suffix = base.partition(".")
        found = next((number for number, one in enumerate(suffixes) if one.lower() == suffix.lower()), None)
        if member.offset <= after or member.isdir() or not stem or found is None:
            continue
        content = archive.extractfile(member) if member.isfile() else None
        yield _Member(
            name=member.name,
            sample=f"{folder}/{stem}",
            rank=found,
            place=place,
            offset=member.offset,
            data=content.read(reading.max_document_bytes + 1) if content else None,
        )


def _member_document(source: Source, member: _Member, reading: Reading) -> Documents:
    where = f"{source.url} member {member.name}"
    if member.data is None:
        return _only_bad(where, "not_a_file", "a link or a device: a tar is read once, from front to back")
    read = _json_document if member.name.lower().endswith(".json") else _document
    return read(where, member.data, place=member.place, reading=reading)


def _text_suffixes(reading: Reading) -> tuple[str, ...]:
    if reading.template or reading.chat:
        return ("json",)
    return ("txt", f"{reading.field}.txt", reading.field, "json")


def _json_document(where: str, data: bytes, *, place: int, reading: Reading) -> Documents:
    if len(data) > reading.max_document_bytes:
        return _too_long(where, reading)
    try:
        text = wanted(reading).text(parse(data.removeprefix(BOM)))
    except NoText as error:
        return _only_bad(where, error.reason, error.detail)
    except ValueError as error:
        return _only_bad(where, "invalid_json", str(error))
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
