"""Media spill: samples written once, as they come, and a table of them in the order of their keys.

    NAME.payload     samples back to back: a header (JSON, its length before it), then their members
    NAME.eE.docs     one DOCUMENT row each, sorted by key: `text_start` and `text_bytes` say where it lies
    NAME.looks       one LOOK row each in the order of the payload, where near copies are looked for

Unlike texts, samples are not sorted on disk: an image is long enough to be read by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from stoker.manifest import FileRecord
from stoker.prepare.media.images import THUMB, Thumb
from stoker.prepare.media.phash import hashes
from stoker.prepare.media.sources.samples import Content
from stoker.prepare.shuffle import DOCUMENT
from stoker.prepare.spill import Ordering, ScratchFile

LOOK = np.dtype(
    [
        ("location", "<u8"),
        ("hash", "<u8"),
        ("label", "<i8"),
        ("width", "<u4"),
        ("height", "<u4"),
        ("thumb", "u1", (THUMB, THUMB)),
    ]
)
_LENGTH_BYTES = 4
_BLOCK = 1 << 20
# A sample without a thumb (sound, or a header check alone) takes no part in a search for near copies.


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What is known of a sample, beside its members: for statistics, and for its copies."""

    formats: tuple[str, ...] = ()
    width: int = 0
    height: int = 0
    label: int = -1
    source: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """A sample as it lies in a payload: the facts, and each member's suffix, start and size."""

    facts: Facts
    members: tuple[tuple[str, int, int], ...]


class MediaSpill:
    """Collects samples; `finish` puts the files in place."""

    def __init__(self, path: Path, *, ordering: Ordering) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._ordering = path, ordering
        self._files: dict[str, ScratchFile] = {}
        self._rows: list[tuple[int, int, int, int, int, int]] = []
        self._looks: list[Any] = []
        self._payload, self._at = self._file("payload"), 0

    def add(
        self,
        members: Sequence[tuple[str, Content]],
        *,
        location: int,
        facts: Facts,
        tokens: int,
        thumb: Thumb | None,
    ) -> None:
        """Write one sample."""
        sizes = [[suffix, len(content)] for suffix, content in members]
        header = json.dumps([asdict(facts), sizes]).encode()
        whole, media = xxhash.xxh3_64(json.dumps(sizes).encode()), xxhash.xxh3_64()
        start = self._at
        self._write(len(header).to_bytes(_LENGTH_BYTES, "little") + header)
        for number, (_, content) in enumerate(members):
            for block in [content] if isinstance(content, bytes) else content.blocks():
                self._write(block)
                whole.update(block)
                if not number:
                    media.update(block)
        row = (media.intdigest(), whole.intdigest(), location, start, tokens, self._at - start)
        self._rows.append(row)
        if thumb is not None:
            self._looks.append((location, 0, facts.label, facts.width, facts.height, thumb))

    def finish(self) -> tuple[list[FileRecord], dict[str, int]]:
        """The files in place, and the run that they hold."""
        table = np.zeros(len(self._rows), DOCUMENT)
        if self._rows:
            columns = np.array(self._rows, np.uint64).T
            for name, column in zip(_ROW, columns, strict=True):
                table[name] = column
        for epoch in range(self._ordering.epochs):
            self._file(f"e{epoch}.docs").write(self._ordering.ordered(table, epoch).tobytes())
        if self._looks:
            looks = np.array(self._looks, LOOK)
            looks["hash"] = hashes(looks["thumb"])
            self._file("looks").write(looks.tobytes())
        run = {
            "documents": len(table),
            "tokens": int(table["tokens"].sum(dtype=np.int64)),
            "text_bytes": int(table["text_bytes"].sum(dtype=np.int64)),
        }
        return [file.finish() for file in self._files.values()], run

    def _write(self, data: bytes) -> None:
        self._payload.write(data)
        self._at += len(data)

    def _file(self, suffix: str) -> ScratchFile:
        if suffix not in self._files:
            self._files[suffix] = ScratchFile(self._path.with_name(f"{self._path.name}.{suffix}"))
        return self._files[suffix]

    def __enter__(self) -> MediaSpill:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()


_ROW = ("high", "low", "location", "text_start", "tokens", "text_bytes")


def unpacked(file: BinaryIO, start: int) -> Packed:
    """The sample whose payload starts there."""
    file.seek(start)
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    facts, sizes = json.loads(file.read(length))
    at, members = start + _LENGTH_BYTES + length, []
    for suffix, size in sizes:
        members.append((suffix, at, size))
        at += size
    known = Facts(**{**facts, "formats": tuple(facts["formats"])})
    return Packed(facts=known, members=tuple(members))


def blocks_of(file: BinaryIO, start: int, size: int) -> Iterator[bytes]:
    """A member's bytes, in blocks."""
    file.seek(start)
    while size:
        block = file.read(min(_BLOCK, size))
        if not block:
            raise EOFError(f"{file.name} ends early: it was cut after its task finished")
        size -= len(block)
        yield block
