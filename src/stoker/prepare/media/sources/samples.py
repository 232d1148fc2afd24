"""Sample readers: any piece of any media source, sample by sample, and what is none beside them."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import ChangedError, StorageError
from stoker.prepare.media.sources.kinds import CAPTION_NAMES, kind_of, suffix_of
from stoker.prepare.media.sources.listing import Listed, kept_samples
from stoker.prepare.sources.documents import BadRecord, Piece, Source
from stoker.storage import is_local, join_url, local_path, named_errors, open_store, split_url

# Larger members are not held: they go from where they are to where they belong in blocks.
HELD_BYTES = 16 << 20
MOST_IMAGE_BYTES = 256 << 20  # a file that has to be decoded is held whole
MOST_SAMPLE_BYTES = (1 << 32) - (1 << 20)  # what an index of samples has room for
_BLOCK = 1 << 20

# Files that are read ahead of the one that is worked on: a store answers in tens of milliseconds.
_AHEAD, _AHEAD_BYTES, _THREADS = 64, 64 << 20, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Bytes that have not been read: from `start` on, of a file or object."""

    url: str
    start: int
    size: int

    def __len__(self) -> int:
        return self.size

    def blocks(self) -> Iterator[bytes]:
        folder, name = split_url(self.url)
        left = self.size
        with named_errors("read", self.url), open_store(folder).open(name) as file:
            file.seek(self.start)
            while left:
                block = file.read(min(_BLOCK, left))
                if not block:
                    raise ChangedError(
                        f"{self.url} became shorter while it was read",
                        hint="once nobody writes to it, run the same command again: it plans anew",
                    )
                left -= len(block)
                yield block


Content = bytes | Stretch


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One training example: its place in the source, where that is in words, and its members by suffix."""

    place: int
    where: str
    members: list[tuple[str, Content]] = field(default_factory=list)
    label: int = -1

    @property
    def bytes(self) -> int:
        return sum(len(content) for _, content in self.members)


Read = Sample | BadRecord


def read_listed(source: Source, piece: Piece, listing: Path, class_numbers: dict[str, int]) -> Iterator[Read]:
    """The samples of a listing; their files are read ahead by threads."""
    pending: deque[tuple[int, Listed, Future[list[tuple[str, Content]]]]] = deque()
    listed, ahead = kept_samples(listing, piece.start, piece.stop), 0
    files = _Files(source.url)
    with ThreadPoolExecutor(_THREADS) as threads:
        try:
            for number, one in listed:
                pending.append((number, one, threads.submit(files.members, one)))
                ahead += sum(file.bytes for file in one.files)
                while len(pending) > _AHEAD or (ahead > _AHEAD_BYTES and len(pending) > 1):
                    ahead -= sum(file.bytes for file in pending[0][1].files)
                    yield _listed_sample(source, *pending.popleft(), class_numbers)
            while pending:
                yield _listed_sample(source, *pending.popleft(), class_numbers)
        finally:
            for _, _, future in pending:
                future.cancel()


def _listed_sample(
    source: Source,
    number: int,
    one: Listed,
    future: Future[list[tuple[str, Content]]],
    class_numbers: dict[str, int],
) -> Read:
    where = join_url(source.url, one.files[0].path)
    members = [*future.result(), *_about(one)]
    label = class_numbers.get(one.label, -1)
    if label >= 0:
        names = [suffix for suffix, _ in members]
        at = next((at for at, name in enumerate(names) if not kind_of(name)), len(names))
        members.insert(at, ("cls", str(label).encode()))
    return Sample(place=number, where=where, members=members, label=label)


def _about(one: Listed) -> list[tuple[str, Content]]:
    """The caption and the rest of what a metadata.jsonl says, unless files beside the sample say it."""
    row = json.loads(one.about) if one.about else {}
    beside = {suffix_of(file.path) for file in one.files}
    caption = next((row.pop(name) for name in CAPTION_NAMES if isinstance(row.get(name), str)), None)
    said = {"txt": caption, "json": json.dumps(row, ensure_ascii=False) if row else None}
    return [
        (name, text.encode(errors="replace"))
        for name, text in said.items()
        if text is not None and name not in beside
    ]


class _Files:
    """Reads the files of samples below one folder or prefix. Any thread may call it."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._read: Callable[[str, int, str], Content] = self._local if is_local(base) else self._remote
        self._store = open_store(base)
        self._folder = local_path(base) if is_local(base) else Path()

    def members(self, one: Listed) -> list[tuple[str, Content]]:
        return [(suffix_of(file.path), self._read(file.path, file.bytes, file.version)) for file in one.files]

    def _local(self, path: str, size: int, version: str) -> Content:
        full = self._folder / path
        with named_errors("read", full), full.open("rb", buffering=0) as file:
            facts = os.fstat(file.fileno())
            if (facts.st_size, str(facts.st_mtime_ns)) != (size, version):
                raise _changed(str(full))
            if _is_streamed(path, size):
                return Stretch(url=str(full), start=0, size=size)
            data = file.readall()
        if len(data) != size:
            raise _changed(str(full))
        return data

    def _remote(self, path: str, size: int, version: str) -> Content:
        if _is_streamed(path, size):
            return Stretch(url=join_url(self._base, path), start=0, size=size)
        data = self._store.read(path)
        if len(data) != size:
            raise _changed(join_url(self._base, path))
        return data


def _is_streamed(path: str, size: int) -> bool:
    return size > (MOST_IMAGE_BYTES if kind_of(suffix_of(path)) == "image" else HELD_BYTES)


def _changed(url: str) -> StorageError:
    return ChangedError(
        f"{url} changed after this run was planned",
        hint="once nobody writes to it, run the same command again: it plans anew",
    )
