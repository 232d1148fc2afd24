"""Committed checkpoints to the remote tier, in the background.

Every rank uploads its own part, verified as it is read; rank 0 says which checkpoint is next (always the
newest), and uploads the manifest once all parts are there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.options import CheckpointOptions
from stoker.errors import CheckpointError, StokerError, StorageError
from stoker.saved.layout import MANIFEST, Part, file_names, newest_first, part_name
from stoker.saved.reader import Checkpoint
from stoker.saved.retention import Ours, remote_garbage, remove_local, remove_remote, retain, superseded
from stoker.saved.tiers import LocalFolder, RemoteFolder, Tiers
from stoker.saved.writer import Pace
from stoker.storage import Store, named_errors

_POLL_S = 0.05
_LONGEST_YIELD_S = 60.0


class Drain:
    """Brings committed checkpoints to the remote tier. Its thread must not outlive the interpreter (a
    client in native code aborts the process then): whoever makes a drain closes it, at exit too."""

    def __init__(
        self, tiers: Tiers, board: Board, options: CheckpointOptions, *, ours: Ours, busy: Callable[[], bool]
    ) -> None:
        self._tiers, self._board, self._options, self._ours, self._busy = tiers, board, options, ours, busy
        self._rank, self._size = options.world.rank, options.world.size
        self._pace = Pace(options.limits.drain_bytes_per_s)
        self._changed = threading.Condition()
        self._newest, self._last = "", ""  # committed and not yet drained; told last
        self._closing, self._leads_here = False, False
        self._failure: BaseException | None = None
        self.drained: list[str] = []
        self._thread = threading.Thread(target=self._run, name="stoker-drain", daemon=True)
        self._thread.start()

    def committed(self, name: str, *, leads_here: bool) -> None:
        with self._changed:
            self._leads_here = leads_here
            if name != self._last:  # else rank 0 was faster, and this rank was told already
                self._newest = name
            self._changed.notify_all()

    def take_failure(self) -> BaseException | None:
        with self._changed:
            failure, self._failure = self._failure, None
            return failure

    def close(self) -> None:
        """Drain what was committed last, then end."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while name := self._next(number):
            try:
                self._drain(number, name)
                self.drained.append(name)
            except BaseException as error:
                with self._changed:
                    self._failure = error
            number += 1

    def _next(self, number: int) -> str:
        """What to drain now; nothing when it is time to end."""
        key = f"drain/{number}"
        if self._rank:
            return self._told(key)
        with self._changed:
            self._changed.wait_for(lambda: self._newest or self._closing)
            name, self._newest = self._newest, ""
        if name:
            self._board.post(key, name.encode())
        return name

    def _told(self, key: str) -> str:
        """What rank 0 says is next. A rank that closes waits for that no longer than for its last save: rank
        0 may hang in a collective that waits for this rank."""
        while True:
            try:
                note = self._board.look(key)
            except StokerError:  # rank 0 is gone
                return ""
            with self._changed:
                if note is not None:
                    self._last = note.decode()
                    if self._last == self._newest:
                        self._newest = ""
                    return self._last
                if self._closing and not self._newest:
                    return ""
                self._changed.wait(_POLL_S)

    def _drain(self, number: int, name: str) -> None:
        key, folder, store = f"drained/{number}", self._tiers.root / name, self._tiers.remote
        assert store is not None
        try:
            self._wait_for_commit(folder)
            self._retried(lambda: self._upload_part(folder, store))
            self._board.post(f"{key}/{self._rank}", b"+")
            if self._rank == 0:
                self._finish(key, folder, store)
        except BaseException as error:
            self._board.post(f"{key}/{self._rank or 'all'}", error_note(error))
            raise
        if self._rank == 0:
            self._tidy(number, store)
            retain(self._tiers, keep=self._options.keep, among=self._ours.has)
        elif self._leads_here:
            checked(self._board.read(f"{key}/all", timeout_s=2 * self._options.timeout_s))
            self._retain_here(name)

    def _finish(self, key: str, folder: Path, store: Store) -> None:
        """Bring the manifest once every rank has brought its part, and tell the nodes with disks of their
        own; where this fails they are told that too, else they would miss the next drain."""
        for rank in range(self._size):
            checked(self._board.read(f"{key}/{rank}", timeout_s=self._options.timeout_s))
        self._retried(lambda: upload_manifest(folder, store))
        self._board.post(f"{key}/all", b"+")

    def _retain_here(self, drained: str) -> None:
        """Delete on the disk of this node what the one just drained stands in for. In the remote tier rank 0
        deletes, at this moment perhaps: two would take files away from under each other."""
        here = Tiers(root=self._tiers.root)
        superseded_here, _ = superseded(here, keep=self._options.keep, among=self._ours.has)
        for name in superseded_here:
            if newest_first({name, drained})[0] != name:
                remove_local(self._tiers.root, name)

    def _wait_for_commit(self, folder: Path) -> None:
        """Rank 0 may be faster than the first rank of this node, which commits here."""
        deadline = time.monotonic() + self._options.timeout_s
        while not (folder / MANIFEST).exists() and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def _upload_part(self, folder: Path, store: Store) -> None:
        part = Checkpoint(LocalFolder(folder)).parts[self._rank]
        name = part_name(self._rank, "bin")
        with named_errors("read", folder / name), (folder / name).open("rb") as file:
            checked_file: Any = _CheckedFile(file, part, folder.name, self._wait_for_turn)
            store.write(f"{folder.name}/{name}", checked_file)
        name = part_name(self._rank, "json")
        store.write(f"{folder.name}/{name}", folder / name)

    def _wait_for_turn(self, count: int) -> None:
        """At its pace, and after the loader; but not for ever: an old checkpoint costs too."""
        deadline = time.monotonic() + _LONGEST_YIELD_S
        while self._busy() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._pace.take(count)

    def _retried(self, work: Callable[[], None]) -> None:
        """Do it until it works: a store may be away for a while."""
        deadline, wait = time.monotonic() + self._options.timeout_s, 0.1
        while True:
            try:
                return work()
            except StorageError:
                if self._closing or time.monotonic() + wait > deadline:
                    raise
            time.sleep(wait)
            wait = min(wait * 2, 30.0)

    def _tidy(self, number: int, store: Store) -> None:
        """Notes that all ranks have read; at first also what an earlier run could not finish uploading."""
        old = f"drained/{number - 1}"
        ranks = (f"{old}/{rank}" for rank in range(self._size))
        self._board.forget([f"drain/{number - 1}", f"{old}/all", *ranks])
        for one in remote_garbage(store) if number == 0 else ():
            remove_remote(store, one.name)


class Loaders:
    """The loaders among what is saved: a drain yields while one of them is behind."""

    def __init__(self, busy: Callable[[], bool] | None) -> None:
        self._busy = busy
        self._known: tuple[Any, ...] = ()

    def note(self, objects: Iterable[Any]) -> None:
        self._known = tuple(one for one in objects if hasattr(type(one), "is_behind"))

    def behind(self) -> bool:
        return bool(self._busy and self._busy()) or any(one.is_behind for one in self._known)


def upload_manifest(folder: Path, store: Store) -> None:
    """Bring the manifest, once every other file is there with its size."""
    checkpoint = Checkpoint(RemoteFolder(store, folder.name))
    text = (folder / MANIFEST).read_bytes()
    for name, size in file_names(Checkpoint(LocalFolder(folder)).manifest):
        found = checkpoint.folder.size(name)
        if found != size:
            raise StorageError(
                f"{checkpoint.folder.url}/{name} has {found:,} bytes after its upload, not {size:,}",
                hint="it is uploaded again with the next checkpoint",
            )
    store.write(f"{folder.name}/{MANIFEST}", text)
    checkpoint.check()


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
                raise CheckpointError(
                    f"{self._name} is damaged here at bytes {index * size:,} to {self._hashed:,}: "
                    "it was not brought to the remote tier",
                    hint="the next save is; check this disk",
                )
            self._hash.reset()
        return data[room:]
