"""WebDataset tars as media sources: samples with all of their members, in the order of the archive."""

from __future__ import annotations

import itertools
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby

from stoker.prepare.media.sources.kinds import kind_of
from stoker.prepare.media.sources.samples import HELD_BYTES, MOST_IMAGE_BYTES, Content, Read, Sample, Stretch
from stoker.prepare.sources.documents import BadRecord, Piece, Source
from stoker.prepare.sources.lines import decompression_errors, open_plain
from stoker.prepare.sources.read import StrictHeader

_PEEKED = 64  # members looked at to see what a tar holds
MOST_SUFFIX_BYTES = 64


@dataclass(slots=True)
class _Seen:
    """How far a tar has been read."""

    offset: int = -1
    is_cut: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Member:
    name: str
    stem: str
    suffix: str
    offset: int
    content: Content | None  # of what is no file: none
    fault: str = ""


def read_tar(source: Source, piece: Piece) -> Iterator[Read]:
    """Every sample. Behind a damaged header the next sound one is looked for."""
    seen, bad = _Seen(), ""
    try:
        yield from _samples(source, seen, through_damage=False)
    except tarfile.TarError as error:
        bad = f"the tar is damaged: {error}"
    except decompression_errors() as error:
        yield BadRecord(where=source.url, reason="truncated", detail=f"the tar is damaged: {error}")
    if seen.is_cut:
        yield BadRecord(
            where=source.url, reason="truncated", detail="the tar is cut short between two members"
        )
    if bad:
        yield BadRecord(where=f"{source.url} after byte {seen.offset:,}", reason="truncated", detail=bad)
        with suppress(tarfile.TarError, *decompression_errors()):
            yield from _samples(source, seen, through_damage=True)


def holds_media(source: Source) -> bool:
    """Whether one of the first members is an image, a sound or a video."""
    with (
        suppress(tarfile.TarError, *decompression_errors()),
        open_plain(source) as file,
        tarfile.open(fileobj=file, mode="r|") as archive,
    ):
        first = itertools.islice(archive, _PEEKED)
        return any(kind_of(_split(member.name)[1]) for member in first)
    return False


def _samples(source: Source, seen: _Seen, *, through_damage: bool) -> Iterator[Read]:
    header = tarfile.TarInfo if through_damage else StrictHeader
    with (
        open_plain(source) as file,
        tarfile.open(fileobj=file, mode="r|", ignore_zeros=through_damage, tarinfo=header) as archive,
    ):
        members = _members(source, archive, after=seen.offset)
        for _, group in groupby(members, key=lambda member: member.stem):
            some = list(group)
            yield _sample(source, some)
            seen.offset = max(member.offset for member in some)
        # tarfile takes a cut-off archive for a short one: a whole one ends with an empty block
        seen.is_cut = not through_damage and archive.fileobj.tell() == archive.offset


def _members(source: Source, archive: tarfile.TarFile, *, after: int) -> Iterator[_Member]:
    for member in archive:
        stem, suffix = _split(member.name)
        if member.offset <= after or member.isdir() or not stem or not suffix:
            continue
        fault = ""
        content: Content | None = None
        if not member.isfile():
            fault = "a link or a device: a tar is read once, from front to back"
        elif member.size > (MOST_IMAGE_BYTES if kind_of(suffix) == "image" else HELD_BYTES):
            if source.compression:
                fault = f"{member.size:,} bytes in a compressed tar: unpack the tar first"
            content = Stretch(url=source.url, start=member.offset_data, size=member.size)
        else:
            opened = archive.extractfile(member)
            content = opened.read() if opened else b""
        yield _Member(
            name=member.name, stem=stem, suffix=suffix, offset=member.offset, content=content, fault=fault
        )


def _sample(source: Source, some: list[_Member]) -> Read:
    where = f"{source.url} member {some[0].name}"
    fault = next((member for member in some if member.fault), None)
    if fault:
        return BadRecord(where=f"{source.url} member {fault.name}", reason="not_a_file", detail=fault.fault)
    names = [member.suffix for member in some]
    if len(set(names)) < len(names):
        return BadRecord(where=where, reason="member_twice", detail="a sample has two members of one name")
    members = [(member.suffix, member.content) for member in some if member.content is not None]
    return Sample(place=some[0].offset, where=where, members=members, label=_label(members))


def _label(members: list[tuple[str, Content]]) -> int:
    content = dict(members).get("cls", b"")
    text = content.strip() if isinstance(content, bytes) else b""
    return int(text) if text.isdigit() and len(text) < 18 else -1


def _split(name: str) -> tuple[str, str]:
    """A member's sample and suffix, as webdataset has them: cut at the first dot of the last part."""
    folder, _, base = name.rpartition("/")
    stem, _, suffix = base.partition(".")
    return (f"{folder}/{stem}" if stem else ""), suffix
