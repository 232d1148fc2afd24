"""Parallel verified reads: a checkpoint's bytes from files or objects, whole chunks, by threads.

What is wanted is said as stretches: so many bytes of a part's file to be handed to a receiver. Every chunk
that holds a wanted byte is read once, hashed, and its wanted stretches are handed over while they are
still in the processor's cache. Nothing unverified is ever handed over.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import xxhash

from stoker.checkpoint.saved.cover import check_parts
from stoker.checkpoint.saved.layout import (
    MANIFEST,
    Manifest,
    Part,
    Piece,
    file_names,
    parse_manifest,
    parse_part,
    part_name,
    part_record,
)
from stoker.checkpoint.saved.threads import in_threads
from stoker.checkpoint.saved.writer import Pace
from stoker.errors import BadCheckpointError, StorageError
from stoker.machine.allowed import usable_cores

_PAGE = 4096
_MOST_THREADS = 8
_CURE = "it is skipped; restore an older one, or copy it again from the remote tier"

Receiver = Callable[[int, memoryview], None]  # (bytes into the stretch, the bytes); from reading threads


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """Bytes `start` to `stop` of a part's file, wanted by a receiver."""

    rank: int
    start: int
    stop: int
    receive: Receiver


class Folder(Protocol):
    """Where the files of one checkpoint lie. Any thread may call."""

    name: str
    url: str

    def read(self, file: str) -> bytes: ...
    def sizes(self, files: Collection[str]) -> Mapping[str, int]: ...  # of those that are there
    def opened(self, file: str) -> Blocks: ...


class Blocks(Protocol):
    """An open file; any thread may read, into page-aligned memory at multiples of the chunk size."""

    def read_into(self, buffer: memoryview, at: int) -> int: ...
    def close(self) -> None: ...


class Checkpoint:
    """One checkpoint: its manifest and parts, read and checked when they are first asked for."""

    def __init__(self, folder: Folder, *, written: Mapping[int, tuple[Part, bytes]] | None = None) -> None:
        """`written`: parts that this process has just written, with their descriptions. What lies there is
        compared with these: to make twenty thousand pieces anew of a text would stop all threads for the
        garbage collector, which takes as long as a third of a second."""
        self.folder = folder
        self.name = folder.name
        self._parts: dict[int, Part] = {}
        self._written = written or {}
        self.pace = Pace()
        self.turn: Callable[[], AbstractContextManager[None]] = nullcontext  # held while data is read

    @property
    def texts(self) -> dict[str, str]:
        """Its manifest and descriptions as they lie there, for somebody else who would have to read them."""
        names = [MANIFEST, *(part_name(rank, "json") for rank in range(len(self.manifest.parts)))]
        return {name: self.folder.read(name).decode() for name in names}

    @cached_property
    def manifest(self) -> Manifest:
        return parse_manifest(_read(self.folder, MANIFEST), name=self.name)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        ranks = range(len(self.manifest.parts))
        found = tuple(in_threads(self.part, ranks, threads=_MOST_THREADS, name="stoker-describe"))
        check_parts(found, save=self.manifest.save)
        return found

    def part(self, rank: int) -> Part:
        """One part's description; who wants no more need not read all of them."""
        if rank not in self._parts:
            text = _read(self.folder, part_name(rank, "json"))
            mine, said = self._written.get(rank, (None, b""))
            if mine and said == text and part_record(mine, text) == self.manifest.parts[rank]:
                self._parts[rank] = mine
            else:
                self._parts[rank] = parse_part(text, manifest=self.manifest, rank=rank)
        return self._parts[rank]

    @property
    def step(self) -> int:
        return self.manifest.step

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        """Every piece, with the rank whose part holds it."""
        for part in self.parts:
            for piece in part.pieces:
                yield part.rank, piece

    def check(self) -> None:
        """Is it whole? Manifest and descriptions are verified, data files must have their size."""
        assert self.parts is not None
        self.check_sizes()

    def check_sizes(self, *, missing_ok: bool = False) -> None:
        """Is every file there, with the size that the manifest says?"""
        wanted = dict(file_names(self.manifest))
        found = self.folder.sizes(wanted)
        for name, size in wanted.items():
            if name not in found:
                if missing_ok:
                    continue
                raise BadCheckpointError(f"{name} of {self.name} is missing in {self.folder.url}", hint=_CURE)
            if found[name] != size:
                raise BadCheckpointError(
                    f"{name} of {self.name} is {found[name]:,} bytes, its manifest says {size:,}", hint=_CURE
                )

    def read(self, stretches: Iterable[Stretch]) -> None:
        """Read, verify and hand over what is wanted."""
        wanted: dict[int, list[Stretch]] = {}
        for stretch in stretches:
            wanted.setdefault(stretch.rank, []).append(stretch)
        with self.turn():
            for rank, mine in sorted(wanted.items()):
                self._read_part(self.part(rank), mine, on_fault=_raise)

    def verify(self, ranks: Iterable[int] | None = None) -> list[str]:
        """Read every byte, of all parts or of these; what is wrong, in words."""
        faults: list[str] = []
        chosen = range(len(self.manifest.parts)) if ranks is None else tuple(ranks)
        sizes = self.folder.sizes([part_name(rank, "bin") for rank in chosen])
        for rank in chosen:
            try:
                part = self.part(rank)
                everything = Stretch(rank=rank, start=0, stop=part.bytes, receive=_ignore)
                self._read_part(part, [everything], on_fault=lambda error: faults.append(error.message))
            except BadCheckpointError as error:
                faults.append(error.message)
                continue
            name = part_name(rank, "bin")
            if sizes.get(name, -1) < 0 and not part.bytes:
                faults.append(f"{name} of {self.name} is missing in {self.folder.url}")
            elif sizes.get(name, 0) > part.bytes:
                faults.append(f"{name} of {self.name} is {sizes[name]:,} bytes, not {part.bytes:,}")
        return faults or self._gaps(chosen)

    def _gaps(self, ranks: Sequence[int]) -> list[str]:
        """Whether the parts make whole tensors, where all of them were read."""
        try:
            assert len(ranks) < len(self.manifest.parts) or self.parts
        except BadCheckpointError as error:
            return [error.message]
        return []

    def _read_part(
        self, part: Part, stretches: Sequence[Stretch], *, on_fault: Callable[[BadCheckpointError], None]
    ) -> None:
        chunks = _by_chunk(stretches, part.chunk_bytes)
        if not chunks:
            return
        with self._readable(part, "cannot be opened"):
            file = self.folder.opened(part_name(part.rank, "bin"))
        buffers = _Buffers(min(part.chunk_bytes, part.bytes))
        threads = min(_MOST_THREADS, max(2, usable_cores()))

        def read(index: int) -> None:
            try:
                self._read_chunk(part, file, index, chunks[index], buffers)
            except BadCheckpointError as error:
                on_fault(error)

        try:
            for _ in in_threads(read, sorted(chunks), threads=threads, name="stoker-read"):
                pass
        finally:
            buffers.close()
            file.close()

    def _read_chunk(
        self, part: Part, file: Blocks, index: int, wanted: Sequence[Stretch], buffers: _Buffers
    ) -> None:
        start = index * part.chunk_bytes
        stop = min(start + part.chunk_bytes, part.bytes)
        with buffers.one() as buffer:
            self.pace.take(stop - start)
            with self._readable(part, f"cannot be read at bytes {start:,} to {stop:,}"):
                found = file.read_into(buffer, start)
            view = buffer[: stop - start]
            if found < stop - start or xxhash.xxh3_64_intdigest(view) != part.chunks[index]:
                raise BadCheckpointError(
                    f"{part_name(part.rank, 'bin')} of {self.name} is damaged at bytes {start:,} to {stop:,}",
                    hint="restore an older checkpoint, or copy this one again from the remote tier",
                )
            for stretch in wanted:
                first, last = max(stretch.start, start), min(stretch.stop, stop)
                stretch.receive(first - stretch.start, view[first - start : last - start])

    @contextmanager
    def _readable(self, part: Part, otherwise: str) -> Iterator[None]:
        """Bytes that a disk or a store does not give back are a fault of this copy, as wrong ones are."""
        try:
            yield
        except (OSError, StorageError) as error:
            said = error.message if isinstance(error, StorageError) else str(error)
            raise BadCheckpointError(
                f"{part_name(part.rank, 'bin')} of {self.name} {otherwise}: {said}",
                hint="restore an older checkpoint, or copy this one again from the remote tier",
            ) from error


class _Buffers:
    """Page-aligned buffers of one size, made when needed and used again."""

    def __init__(self, size: int) -> None:
        self._size = -(-size // _PAGE) * _PAGE
        self._free: list[mmap.mmap] = []

    @contextmanager
    def one(self) -> Iterator[memoryview]:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = mmap.mmap(-1, self._size)
        with memoryview(buffer) as view:
            yield view
        self._free.append(buffer)

    def close(self) -> None:
        for buffer in self._free:
            # whoever looks at the threads' stacks just now (a profiler, `stoker watch`) holds a view: the
            # memory goes with that
            with suppress(BufferError):
                buffer.close()


def _by_chunk(stretches: Iterable[Stretch], chunk_bytes: int) -> dict[int, list[Stretch]]:
    found: dict[int, list[Stretch]] = {}
    for stretch in stretches:
        if stretch.stop > stretch.start:
            for index in range(stretch.start // chunk_bytes, -(-stretch.stop // chunk_bytes)):
                found.setdefault(index, []).append(stretch)
    return found


def _ignore(at: int, data: memoryview) -> None:
    pass


def _raise(error: BadCheckpointError) -> None:
    raise error


def _read(folder: Folder, file: str) -> bytes:
    try:
        return folder.read(file)
    except StorageError as error:
        raise BadCheckpointError(
            f"{folder.url} has no readable {file}: {error.message}",
            hint="it is unfinished, or no checkpoint; `stoker checkpoint gc` clears what dead runs left",
        ) from error
