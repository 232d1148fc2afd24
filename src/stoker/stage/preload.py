"""Page-cache warming: files in memory, by option; told to the page cache, or copied to /dev/shm.

In /dev/shm lies a second cache, fed from the first: the same leases, digests and pins, and a budget of
what is free. A file that does not fit is read from the disk. It is emptied of what nobody reads when a
reader closes; after a kill the next job finds its files still there, or evicts them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from stoker.errors import StokerError
from stoker.stage.disk.grounds import Grounds, own_folder
from stoker.stage.disk.pins import Pins
from stoker.stage.disk.room import Room
from stoker.stage.disk.shelf import Shelf
from stoker.stage.fetch import Fetcher
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit
from stoker.stage.wire.wire import Wire

_SHARE = 0.8  # of the memory that is available: the rest is for what the job itself will want


class Preload(Protocol):
    """Called from any thread with a file of a unit that lies on the disk, below the cache's folder `root`;
    gives the path to read."""

    def path(self, unit: Unit, name: str, *, root: Path) -> Path: ...
    def close(self) -> None: ...


def make_preload(kind: str, *, ttl_s: float, keep: bool = False) -> Preload:
    if kind == "page-cache":
        return PageCache()
    if kind == "shm":
        return Shm(shm_folder(), ttl_s=ttl_s, keep=keep)
    return OnDisk()


class OnDisk:
    """No preloading."""

    def path(self, unit: Unit, name: str, *, root: Path) -> Path:
        return root / unit.folder / name

    def close(self) -> None:
        pass


class PageCache(OnDisk):
    """Asks the kernel to read files ahead. What it keeps is up to the kernel."""

    def path(self, unit: Unit, name: str, *, root: Path) -> Path:
        path = root / unit.folder / name
        from stoker.machine.allowed import free_bytes  # 10 ms, and most never ask

        size = path.stat().st_size
        if size <= _SHARE * free_bytes():
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.posix_fadvise(handle, 0, size, os.POSIX_FADV_WILLNEED)
            finally:
                os.close(handle)
        return path


class Shm:
    """Copies of files in a folder that is memory."""

    def __init__(self, folder: Path, *, ttl_s: float, keep: bool) -> None:
        from stoker.machine.allowed import free_bytes

        own_folder(folder, hint="remove it, or leave preload='shm' out")
        self._shelf, self._keep = Shelf(Grounds.of(folder)), keep
        lying = sum(record.unit.bytes for record in self._shelf.records())
        facts = os.statvfs(folder)
        fits = min(free_bytes(), facts.f_bavail * facts.f_frsize) * _SHARE
        self._room = Room(self._shelf, budget_bytes=max(1, int(lying + fits)), ttl_s=ttl_s)
        self._pins = Pins(self._shelf.pins_folder(), ttl_s=ttl_s, purpose="reading")
        self._wire = Wire()
        self._fetcher = Fetcher(self._shelf, self._room, self._wire, ttl_s=ttl_s)

    def path(self, unit: Unit, name: str, *, root: Path) -> Path:
        near = replace(unit, files=tuple(_on_disk(file, root / unit.folder) for file in unit.files))
        self._pins.add(near.key)
        try:
            self._fetcher.bring(near)
        except BaseException as error:
            self._pins.drop(near.key)
            if not isinstance(error, StokerError):
                raise
            # no room; or it is damaged on the disk: who reads it there finds out, and has it brought again
            return root / unit.folder / name
        return self._shelf.path_of(near, name)

    def close(self) -> None:
        self._fetcher.stop()
        self._wire.close()
        self._pins.close()
        if not self._keep:
            self._room.empty()


def shm_folder() -> Path:
    return Path(f"/dev/shm/stoker-cache-{os.getuid()}")


def _on_disk(file: RemoteFile, folder: Path) -> RemoteFile:
    path = folder / file.name
    return replace(file, url=str(path), version=str(path.stat().st_mtime_ns))
