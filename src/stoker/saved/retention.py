"""What may go: checkpoints that newer ones stand in for, and what dead runs left.

Nothing goes that a newer, whole checkpoint does not stand in for, in the remote tier where there is one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import StokerError
from stoker.saved.commit import OWNER, is_dead
from stoker.saved.layout import MANIFEST, SAVING, newest_first, sequence_of
from stoker.saved.reader import Checkpoint, Folder
from stoker.saved.tiers import LocalFolder, RemoteFolder, Tiers, local_names, remote_names
from stoker.storage import Store, sync_folder

TRASH = ".trash-"
_SILENT_S = 24 * 3600.0  # what a process on another machine has not touched for so long is taken for dead
_NAMELESS_S = 600.0


class Ours:
    """Which checkpoints a job may delete: its own, and those that were there before its first. Others are of
    a job that saves into the same folder at the same time."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._first: int | None = None  # sequence of

    def add(self, name: str) -> None:
        self._names.add(name)
        if self._first is None:
            self._first = sequence_of(name)

    def has(self, name: str) -> bool:
        return name in self._names or self._first is None or (sequence_of(name) or 0) < self._first


def _any_name(name: str) -> bool:
    return True


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


def superseded(
    tiers: Tiers, *, keep: int, among: Callable[[str], bool] = _any_name
) -> tuple[list[str], list[str]]:
    """What newer whole checkpoints stand in for, here and in the remote tier; others are not looked at."""
    if keep <= 0:
        return [], []
    names = filter(among, local_names(tiers.root))
    near = [one for one in names if _is_whole(LocalFolder(tiers.root / one), parts=False)]
    if tiers.remote is None:
        return expired(near, keep=keep), []
    far = [*filter(among, tiers.remote_names())]
    safe = {next((one for one in far if _is_whole(RemoteFolder(tiers.remote, one))), "")}
    return expired(near, keep=keep, safe=safe), expired(far, keep=keep, safe=safe)


def retain(tiers: Tiers, *, keep: int, among: Callable[[str], bool] = _any_name) -> list[str]:
    """Delete what is superseded; gives the names of those that were here."""
    near, far = superseded(tiers, keep=keep, among=among)
    for name in far:
        assert tiers.remote is not None
        remove_remote(tiers.remote, name)
    for name in near:
        remove_local(tiers.root, name)
    return near


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
                size = sum(stat.st_size for stat in _stats(path))
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
    if dead is None:
        newest = max((stat.st_mtime for stat in _stats(path)), default=time.time())
        if time.time() - newest > silent_s:
            return f"nobody has touched it for {(time.time() - newest) / 3600:.0f} hours"
    return ""


def _stats(folder: Path) -> list[os.stat_result]:
    """Of a folder and of the files in it, of which some may go meanwhile."""
    found = []
    with suppress(OSError):
        for path in (folder, *folder.iterdir()):
            with suppress(OSError):
                found.append(path.stat())
    return found
