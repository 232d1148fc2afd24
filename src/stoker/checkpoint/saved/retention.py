"""Retention and garbage collection: checkpoints that newer ones stand in for, and what dead runs left.

Nothing goes unless a newer checkpoint of the same tier was read back, every byte of it; and only good ones
count among those that are kept.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.checkpoint.saved.commit import MAKING, OWNER, is_dead, maker_is_dead
from stoker.checkpoint.saved.keep import ONLY_PINS, KeepRules, spared_here, spared_there
from stoker.checkpoint.saved.layout import MANIFEST, NO_RECORD, SAVING, newest_first, sequence_of
from stoker.checkpoint.saved.reader import Checkpoint, Folder
from stoker.checkpoint.saved.tiers import LocalFolder, RemoteFolder, local_names, read_file, remote_names
from stoker.errors import StokerError
from stoker.storage import Store, named_errors, sync_folder

TRASH = ".trash-"
_SILENT_S = 24 * 3600.0  # what a process on another machine has not touched for so long is taken for dead
_NAMELESS_S = 60.0  # a folder is signed as soon as it is made
_TEMPORARY = re.compile(r"^\..+\.[0-9a-f]{12}\.tmp$")  # what `storage.new_file` writes to


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

    def made(self, name: str) -> bool:
        """Whether this job saved it."""
        return name in self._names

    def has(self, name: str) -> bool:
        return name in self._names or self._first is None or (sequence_of(name) or 0) < self._first


def expired(
    names: Sequence[str],
    *,
    keep: int,
    good: Callable[[str], bool],
    proven: Callable[[str], bool],
    spare: Collection[str] = (),
) -> list[str]:
    """Which of these (newest first) may go: what is older than `keep` good ones, if one of those was read
    back. Neither is asked of more names than it takes."""
    if keep <= 0 or len(names) <= keep:
        return []
    gone, kept, stands = [], 0, False
    for name in names:
        if kept < keep:
            is_good = good(name)
            kept += is_good
            stands = stands or (is_good and proven(name))
        elif name not in spare:
            gone.append(name)
    return gone if stands else []


def over_budget(
    sizes: Sequence[tuple[str, int]],
    *,
    budget: int,
    need: int,
    proven: Callable[[str], bool],
    spare: Collection[str] = (),
) -> list[str]:
    """Which of these (newest first, with their bytes) must go so that `need` more bytes fit: the oldest
    first, of those that are older than one that was read back."""
    total, gone = sum(size for _, size in sizes) + need, []
    newest = next((at for at, (name, _) in enumerate(sizes) if proven(name)), len(sizes))
    for name, size in reversed(sizes[newest + 1 :]):
        if budget and total > budget and name not in spare:
            gone.append(name)
            total -= size
    return gone


def retain_local(
    root: Path,
    *,
    keep: int,
    proven: Callable[[str], bool],
    among: Callable[[str], bool],
    spare: Collection[str] = (),
    rules: KeepRules = ONLY_PINS,
) -> list[str]:
    """Delete here what newer ones stand in for; gives the names."""
    names = [*filter(among, local_names(root))] if keep else []
    spare = {*spare, *spared_here(root, names, rules)} if len(names) > keep else spare
    gone = expired(names, keep=keep, good=lambda one: has_local(root, one), proven=proven, spare=spare)
    for name in gone:
        remove_local(root, name)
    return gone


def make_room(
    root: Path,
    *,
    budget: int,
    proven: Callable[[str], bool],
    among: Callable[[str], bool],
    spare: Collection[str] = (),
    rules: KeepRules = ONLY_PINS,
) -> list[str]:
    """Delete here what does not fit beside one more of the newest's size; gives the names."""
    if not budget:
        return []
    sizes = [(name, _bytes_in(root / name)) for name in filter(among, local_names(root))]
    need = sizes[0][1] if sizes else 0
    spare = {*spare, *spared_here(root, [name for name, _ in sizes], rules)}
    gone = over_budget(sizes, budget=budget, need=need, proven=proven, spare=spare)
    for name in gone:
        remove_local(root, name)
    return gone


def retain_remote(
    store: Store,
    *,
    root: Path,
    keep: int,
    proven: Callable[[str], bool],
    among: Callable[[str], bool],
    rules: KeepRules = ONLY_PINS,
) -> list[str]:
    """The same in the remote tier. Pins are kept in the run folder."""
    names = [*filter(among, remote_names(store))] if keep else []
    spare = spared_there(store, names, rules, root=root) if len(names) > keep else ()
    gone = expired(names, keep=keep, good=lambda one: has_remote(store, one), proven=proven, spare=spare)
    for name in gone:
        remove_remote(store, name)
    return gone


def has_local(root: Path, name: str) -> bool:
    """Whether a checkpoint is good as far as its manifest and the sizes of its files tell. A node with a disk
    of its own has its own parts only."""
    folder = LocalFolder(root / name)
    return _is_good(folder, lambda checkpoint: checkpoint.check_sizes(missing_ok=True))


def has_remote(store: Store, name: str) -> bool:
    return _is_good(RemoteFolder(store, name), lambda checkpoint: checkpoint.check_sizes())


def _is_good(folder: Folder, check: Callable[[Checkpoint], None]) -> bool:
    try:
        checkpoint = Checkpoint(folder)
        assert checkpoint.manifest
        check(checkpoint)
    except StokerError:
        return False
    return True


def remove_local(root: Path, name: str) -> None:
    """Delete a checkpoint; it is out of sight at once, whole, before its files go."""
    if (root / name).is_symlink():  # what it leads to is somebody else's
        (root / name).unlink(missing_ok=True)
        return
    trash = root / f"{TRASH}{name.removeprefix(TRASH).removeprefix(SAVING).removeprefix(MAKING)}"
    with named_errors("delete", root / name), suppress(FileNotFoundError):  # another was faster
        (root / name).rename(trash)
        sync_folder(root)
        shutil.rmtree(trash, ignore_errors=True)  # what a reader holds open goes with the next collection


def remove_remote(store: Store, name: str) -> None:
    """Delete a checkpoint's objects, its manifest first: what is half gone must not look whole."""
    store.delete(f"{name}/{MANIFEST}")
    for entry in list(store.list(f"{name}/")):
        store.delete(entry.path)


# --- garbage ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Garbage:
    """What a dead run left."""

    name: str
    bytes: int
    why: str
    tier: str = "local"


def garbage(root: Path, *, silent_s: float = _SILENT_S) -> list[Garbage]:
    """Saves that were never finished and deletions that were not either, if their makers are dead."""
    return [one for one, dead in _unfinished(root, silent_s=silent_s) if dead]


def left_alone(root: Path) -> list[Garbage]:
    """What is unfinished and may still be worked on."""
    return [one for one, dead in _unfinished(root, silent_s=_SILENT_S) if not dead]


def _unfinished(root: Path, *, silent_s: float) -> list[tuple[Garbage, bool]]:
    found = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if path.name.startswith(TRASH):
            dead, why = True, "a deletion that was cut short"
        elif path.name.startswith(SAVING):
            dead, why = _is_dead(path, silent_s)
        elif path.name.startswith(MAKING):
            dead, why = _is_dead_maker(path, silent_s)
        elif _TEMPORARY.match(path.name):
            dead, why = _is_silent(path, min(silent_s, _NAMELESS_S), "a file that was not finished")
        else:
            continue
        found.append((Garbage(name=path.name, bytes=_bytes_in(path), why=why), dead))
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
        if (root / one.name).is_dir() or (root / one.name).is_symlink():
            remove_local(root, one.name)
        else:
            (root / one.name).unlink(missing_ok=True)
    return found


def _is_dead(path: Path, silent_s: float) -> tuple[bool, str]:
    try:
        owner = json.loads(read_file(path / OWNER))
        dead, who = is_dead(owner), f"process {owner['pid']} on {owner['host']}"
    except (OSError, *NO_RECORD):  # it was killed before it could say whose it is, or is somebody else's
        return _is_silent(path, min(silent_s, _NAMELESS_S), "a save that nobody has signed")
    if dead is None:
        return _is_silent(path, silent_s, f"a save of {who}")
    return dead, f"{who}, which made it, is gone" if dead else f"{who}, which made it, lives"


def _is_dead_maker(path: Path, silent_s: float) -> tuple[bool, str]:
    what = "a save that had not begun"
    try:
        dead = maker_is_dead(path.name)
    except NO_RECORD:  # a name that we do not make
        dead = None
    if dead is None:
        return _is_silent(path, min(silent_s, _NAMELESS_S), what)
    return dead, f"{what}: the process that made it {'is gone' if dead else 'lives'}"


def _is_silent(path: Path, silent_s: float, what: str) -> tuple[bool, str]:
    age_s = time.time() - max((stat.st_mtime for stat in _stats(path)), default=time.time())
    return age_s > silent_s, f"{what}: nobody has touched it for {age_s / 3600:.1f} hours"


def _bytes_in(path: Path) -> int:
    return sum(stat.st_size for stat in _stats(path))


def _stats(path: Path) -> list[os.stat_result]:
    """Of a file, or of a folder and of the files in it, of which some may go meanwhile."""
    found = []
    with suppress(OSError):
        found.append(path.stat())
        for one in path.iterdir():
            with suppress(OSError):
                found.append(one.stat())
    return found
