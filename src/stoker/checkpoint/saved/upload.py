"""One checkpoint's files to the remote tier, verified as they are read, and read back where that counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from stoker.checkpoint.saved.layout import MANIFEST, Part, part_name
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.tiers import LocalFolder, Remembered, RemoteFolder
from stoker.checkpoint.saved.writer import Pace
from stoker.errors import BadCheckpointError, StokerError, StorageError
from stoker.storage import Store, named_errors


class Upload:
    """A checkpoint on its way. `take` is called for all bytes that go, and may wait."""

    def __init__(self, folder: Path, store: Store, *, pace: Pace, take: Callable[[int], None]) -> None:
        self._folder, self._store, self._take = folder, store, take
        self._near = Checkpoint(LocalFolder(folder))
        texts = {MANIFEST: LocalFolder(folder).read(MANIFEST).decode()}
        self._far = Checkpoint(Remembered(RemoteFolder(store, folder.name), texts))
        self._far.pace = pace

    @property
    def ranks(self) -> range:
        """Of the parts."""
        return range(len(self._near.manifest.parts))

    def bring(self, ranks: Iterable[int], *, again: bool, read_back: bool) -> None:
        """Bring these parts; with `again` only those that are not there yet."""
        for rank in ranks:
            if not (again and self._is_there(rank, read_back=read_back)):
                self._write(rank)
                if read_back and (faults := self._faults(rank)):
                    raise StorageError(
                        f"what was uploaded comes back wrong: {faults[0]}", hint="it is uploaded again"
                    )

    def finish(self) -> None:
        """Bring the manifest, once every other file is there with its size."""
        try:
            self._far.check_sizes()
        except BadCheckpointError as error:
            raise StorageError(
                f"after its upload: {error.message}", hint="it is uploaded again by itself"
            ) from error
        text = (self._folder / MANIFEST).read_bytes()
        self._store.write(f"{self._folder.name}/{MANIFEST}", text)
        if self._store.read(f"{self._folder.name}/{MANIFEST}") != text:
            raise StorageError(
                f"the manifest of {self._folder.name} comes back wrong after its upload",
                hint="it is uploaded again by itself",
            )

    def _is_there(self, rank: int, *, read_back: bool) -> bool:
        sizes = dict(self._sizes(rank))
        if self._far.folder.sizes(sizes) != sizes:
            return False
        return not read_back or not self._faults(rank)

    def _sizes(self, rank: int) -> list[tuple[str, int]]:
        record = self._near.manifest.parts[rank]
        return [(part_name(rank, "bin"), record.bytes), (part_name(rank, "json"), record.json_bytes)]

    def _faults(self, rank: int) -> list[str]:
        """What is wrong with the copy there; what cannot be read may be read later."""
        try:
            return self._far.verify([rank])
        except StokerError as error:
            return [error.message]

    def _write(self, rank: int) -> None:
        name = part_name(rank, "bin")
        with named_errors("read", self._folder / name), (self._folder / name).open("rb") as file:
            checked_file: Any = _CheckedFile(file, self._near.part(rank), self._folder.name, self._take)
            self._store.write(f"{self._folder.name}/{name}", checked_file)
        name = part_name(rank, "json")
        self._store.write(f"{self._folder.name}/{name}", self._folder / name)


def push(folder: Path, store: Store, *, pace: Pace | None = None) -> list[int]:
    """Bring what lies here of a checkpoint, and its manifest once all is there; gives the parts that neither
    this node nor the store has."""
    pace = pace or Pace()
    upload = Upload(folder, store, pace=pace, take=pace.take)
    here = [rank for rank in upload.ranks if (folder / part_name(rank, "bin")).exists()]
    upload.bring(here, again=True, read_back=True)
    sizes = {part_name(rank, "bin") for rank in upload.ranks}
    there = RemoteFolder(store, folder.name).sizes(sizes)
    missing = [rank for rank in upload.ranks if part_name(rank, "bin") not in there]
    if not missing:
        upload.finish()
    return missing


class _CheckedFile:
    """A part's file for an upload, which reads it once from its beginning: every chunk is checked on the way,
    so that what a disk has damaged since does not become the copy that others are deleted for."""

    def __init__(self, file: BinaryIO, part: Part, name: str, wait: Callable[[int], None]) -> None:
        self._file, self._part, self._name, self._wait = file, part, name, wait
        self._hash, self._hashed = xxhash.xxh3_64(), 0

    def read(self, size: int = -1) -> bytes:
        if self._file.tell() == 0:
            self._hash, self._hashed = xxhash.xxh3_64(), 0
        data = self._file.read(size)
        if data:
            self._wait(len(data))
        rest = memoryview(data)
        while rest:
            rest = self._check_some(rest)
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _check_some(self, data: memoryview) -> memoryview:
        """Hash up to the end of a chunk; gives what is left."""
        size = self._part.chunk_bytes
        index, room = self._hashed // size, size - self._hashed % size
        self._hash.update(data[:room])
        self._hashed += len(data[:room])
        if self._hashed % size == 0 or self._hashed == self._part.bytes:
            if self._hash.intdigest() != self._part.chunks[index]:
                raise BadCheckpointError(
                    f"{self._name} is damaged here at bytes {index * size:,} to {self._hashed:,}: "
                    "it was not brought to the remote tier",
                    hint="the next save is; check this disk",
                )
            self._hash.reset()
        return data[room:]
