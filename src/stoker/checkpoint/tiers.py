"""Near and far: where checkpoints lie, what is drained to the remote tier, and what may be deleted.

A checkpoint is in the remote tier once its manifest object is there; that one is uploaded last. Nothing is
deleted that a newer, whole checkpoint does not stand in for, in the remote tier where there is one.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from stoker.checkpoint.commit import OWNER, is_dead
from stoker.checkpoint.layout import MANIFEST, SAVING, file_names, newest_first, part_name
from stoker.checkpoint.reader import BothTiers, Checkpoint, Folder, LocalFolder, RemoteFolder
from stoker.checkpoint.writer import Pace
from stoker.errors import BadCheckpointError, StokerError, StorageError
from stoker.storage import Store, named_errors, sync_folder

TRASH = ".trash-"
FAR = "@remote"  # behind a name: the copy in the remote tier, whatever lies here
_SILENT_S = 24 * 3600.0  # what a process on another machine has not touched for so long is taken for dead
_NAMELESS_S = 600.0
_YIELD_S = 0.05
_LONGEST_YIELD_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiers:
    """The folder that is saved to and, if there is one, the store it is drained to."""

    root: Path
    remote: Store | None = None

    def names(self) -> list[str]:
        """Every checkpoint of either tier, whole or not, the newest first."""
        return newest_first({*local_names(self.root), *self.remote_names()})

    def remote_names(self) -> list[str]:
        return remote_names(self.remote) if self.remote else []

    def copies(self, *, said: list[str]) -> list[str]:
        """Every checkpoint, the newest first; one that lies in both tiers is there twice, near before far.
        Without the remote tier what is here must do, if there is something: that is added to a list."""
        try:
            far = self.remote_names()
        except StorageError as error:
            if not local_names(self.root):
                raise  # a fresh start would be wrong: there may be something
            said.append(f"the remote tier: {error.message}")
            far = []
        near = local_names(self.root)
        names = newest_first({*near, *far})
        return [copy for name in names for copy in ((name, f"{name}{FAR}") if name in far else (name,))]

    def checkpoint(self, name: str) -> Checkpoint:
        """A checkpoint from the nearest place that has it; single files may come from further away."""
        near: Folder = LocalFolder(self.root / name)
        if self.remote is None:
            return Checkpoint(near)
        if name.endswith(FAR):
            return Checkpoint(RemoteFolder(self.remote, name.removesuffix(FAR)))
        return Checkpoint(BothTiers(near, RemoteFolder(self.remote, name)))

    def whole(self, names: Iterable[str], *, skipped: list[str]) -> Iterable[Checkpoint]:
        """The whole ones among these; why others are skipped is added to a list."""
        for name in names:
            checkpoint = self.checkpoint(name)
            try:
                checkpoint.check()
            except (BadCheckpointError, StorageError) as error:
                skipped.append(f"{name}: {error.message}")
                continue
            yield checkpoint

    def latest(self) -> Checkpoint | None:
        """The newest whole one."""
        return next(iter(self.whole(self.names(), skipped=[])), None)


def local_names(root: Path) -> list[str]:
    try:
        return newest_first(path.name for path in root.iterdir() if path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        with named_errors("read", root):
            raise error


def remote_names(store: Store) -> list[str]:
    """The checkpoints whose manifest is in a store."""
    paths = (entry.path for entry in store.list())
    return newest_first(path.partition("/")[0] for path in paths if path.endswith(f"/{MANIFEST}"))


# --- draining -----------------------------------------------------------------------------------------


def upload_part(
    folder: Path, store: Store, *, rank: int, pace: Pace, busy: Callable[[], bool] | None = None
) -> None:
    """Bring one rank's files to the store."""
    for kind in ("bin", "json"):
        name = part_name(rank, kind)
        with named_errors("read", folder / name), (folder / name).open("rb") as file:
            paced: Any = _Paced(file, pace, busy)
            store.write(f"{folder.name}/{name}", paced)


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


class _Paced:
    """A file that is read at a pace, and not while somebody needs the network more."""

    def __init__(self, file: BinaryIO, pace: Pace, busy: Callable[[], bool] | None) -> None:
        self._file, self._pace, self._busy = file, pace, busy

    def read(self, size: int = -1) -> bytes:
        self._yield()
        data = self._file.read(size)
        self._pace.take(len(data))
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def _yield(self) -> None:
        """Let the loader go first, but not for ever: an old checkpoint costs too."""
        deadline = time.monotonic() + _LONGEST_YIELD_S
        while self._busy and self._busy() and time.monotonic() < deadline:
            time.sleep(_YIELD_S)


def retried(work: Callable[[], None], *, timeout_s: float, stop: Callable[[], bool]) -> None:
    """Do it until it works: a store may be away for a while."""
    deadline, wait = time.monotonic() + timeout_s, 0.1
    while True:
        try:
            return work()
        except StokerError:
            if stop() or time.monotonic() + wait > deadline:
                raise
        time.sleep(wait)
        wait = min(wait * 2, 30.0)


# --- retention ----------------------------------------------------------------------------------------


def expired(names: Sequence[str], *, keep: int, safe: Collection[str] | None = None) -> list[str]:
    """Which of these (newest first) may go: beyond the newest `keep`, and older than one that is safe
    elsewhere, where `safe` says which are."""
    if keep <= 0:
        return []
    rest = names[keep:]
    if safe is None:
        return list(rest)
    newest_safe = next((at for at, name in enumerate(names) if name in safe), len(names))
    return [name for name in rest if names.index(name) > newest_safe]


def retain(tiers: Tiers, *, keep: int) -> list[str]:
    """Delete what newer whole checkpoints stand in for; gives their names."""
    if keep <= 0:
        return []
    safe = None
    if tiers.remote is not None:
        far = tiers.remote_names()
        newest = next((one for one in far if _is_whole(RemoteFolder(tiers.remote, one))), "")
        safe = {newest}
        for name in expired(far, keep=keep, safe=safe):
            remove_remote(tiers.remote, name)
    near = [one for one in local_names(tiers.root) if _is_whole(LocalFolder(tiers.root / one), parts=False)]
    gone = expired(near, keep=keep, safe=safe)
    for name in gone:
        remove_local(tiers.root, name)
    return gone


def remove_local(root: Path, name: str) -> None:
    """Delete a checkpoint; it is out of sight at once, whole, before its files go."""
    trash = root / f"{TRASH}{name.removeprefix(TRASH).removeprefix(SAVING)}"
    with suppress(OSError):
        (root / name).rename(trash)
        sync_folder(root)
        shutil.rmtree(trash)


def remove_remote(store: Store, name: str) -> None:
    """Delete a checkpoint's objects, its manifest first: what is half gone must not look whole."""
    store.delete(f"{name}/{MANIFEST}")
    for entry in list(store.list(f"{name}/")):
        store.delete(entry.path)


def _is_whole(folder: Folder, *, parts: bool = True) -> bool:
    try:
        checkpoint = Checkpoint(folder)
        assert checkpoint.manifest
        if parts:
            checkpoint.check()
    except StokerError:
        return False
    return True


# --- garbage ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """What a dead run left."""

    name: str
    bytes: int
    why: str


def garbage(root: Path, *, silent_s: float = _SILENT_S) -> list[Garbage]:
    """Saves that were never finished and deletions that were not either, if their makers are dead."""
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith((SAVING, TRASH)) and path.is_dir():
            why = (
                "a deletion that was cut short" if path.name.startswith(TRASH) else _why_dead(path, silent_s)
            )
            if why:
                size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
                found.append(Garbage(name=path.name, bytes=size, why=why))
    return found


def remote_garbage(store: Store) -> list[Garbage]:
    """Uploads without a manifest that are older than a whole one: drains go in order, so nobody is still
    at them."""
    whole = remote_names(store)
    sizes: dict[str, int] = {}
    for entry in store.list():
        name = entry.path.partition("/")[0]
        sizes[name] = sizes.get(name, 0) + entry.bytes
    older = newest_first({*sizes, *whole})
    older = older[older.index(whole[0]) :] if whole else []
    why = "an upload without a manifest"
    return [Garbage(name=name, bytes=sizes[name], why=why) for name in older if name not in whole]


def collect(root: Path, *, silent_s: float = _SILENT_S) -> list[Garbage]:
    """Delete what dead runs left; gives what it was."""
    found = garbage(root, silent_s=silent_s)
    for one in found:
        remove_local(root, one.name)
    return found


def _why_dead(path: Path, silent_s: float) -> str:
    try:
        owner = json.loads((path / OWNER).read_bytes())
        dead = is_dead(owner)
    except (OSError, ValueError, KeyError):  # it was killed before it could say whose it is
        owner, dead, silent_s = {}, None, min(silent_s, _NAMELESS_S)
    if dead:
        return f"process {owner['pid']} on {owner['host']}, which made it, is gone"
    newest = max((file.stat().st_mtime for file in path.iterdir()), default=path.stat().st_mtime)
    if dead is None and time.time() - newest > silent_s:
        return f"nobody has touched it for {(time.time() - newest) / 3600:.0f} hours"
    return ""
