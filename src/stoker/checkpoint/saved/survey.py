"""What lies in the tiers of a run, looked at from outside: listed, verified, sorted out, cleared away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from stoker.checkpoint.saved.keep import ONLY_PINS, spared_here, spared_there
from stoker.checkpoint.saved.layout import MANIFEST, Manifest, newest_first, part_name
from stoker.checkpoint.saved.reader import Checkpoint, Folder
from stoker.checkpoint.saved.retention import (
    Garbage,
    collect,
    expired,
    garbage,
    left_alone,
    remote_garbage,
    remove_local,
    remove_remote,
)
from stoker.checkpoint.saved.threads import in_threads
from stoker.checkpoint.saved.tiers import (
    BothTiers,
    LocalFolder,
    RemoteFolder,
    Tiers,
    local_names,
    remote_folders,
)
from stoker.errors import StokerError

_THREADS = 16  # that ask a store for manifests: a thousand of them one by one took 9 s
LOCAL, REMOTE = "local", "remote"


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """One checkpoint: in which tiers it lies, what is wrong with which copy, its manifest if one is whole."""

    name: str
    tiers: tuple[str, ...]
    faults: Mapping[str, str]
    manifest: Manifest | None


def survey(tiers: Tiers) -> list[Listed]:
    """Every checkpoint, the newest first. Manifests are read and sizes compared, of every copy."""
    near, far = local_names(tiers.root), {}
    if tiers.remote is not None:
        found = remote_folders(tiers.remote)
        far = {name: folder for name, folder in found.items() if folder.sizes([MANIFEST])}
    names = newest_first({*near, *far})

    def look(name: str) -> Listed:
        copies: dict[str, Folder] = {}
        if name in near:
            here = LocalFolder(tiers.root / name)
            copies[LOCAL] = BothTiers(here, far[name]) if name in far else here
        if name in far:
            copies[REMOTE] = far[name]
        return _listed(name, copies)

    return [*in_threads(look, names, threads=_THREADS, name="stoker-survey")]


def _listed(name: str, copies: Mapping[str, Folder]) -> Listed:
    manifest, faults = None, {}
    for tier, folder in copies.items():
        try:
            checkpoint = Checkpoint(folder)
            checkpoint.check() if tier == LOCAL else checkpoint.check_sizes()
            manifest = manifest or checkpoint.manifest
        except StokerError as error:
            faults[tier] = error.message
    return Listed(name=name, tiers=tuple(copies), faults=faults, manifest=manifest)


def verify_copies(tiers: Tiers, name: str) -> dict[str, list[str]]:
    """What is wrong with every copy of a checkpoint, every byte read. Of a node with a disk of its own, and a
    remote tier, the copy here is the parts that it has."""
    found: dict[str, list[str]] = {}
    here = tiers.root / name
    if here.is_dir():
        near = Checkpoint(LocalFolder(here))
        found[LOCAL] = _faults(near, parts_here=tiers.remote is not None)
    if tiers.remote is not None and RemoteFolder(tiers.remote, name).sizes([MANIFEST]):
        found[REMOTE] = _faults(Checkpoint(RemoteFolder(tiers.remote, name)), parts_here=False)
    return found


def _faults(checkpoint: Checkpoint, *, parts_here: bool) -> list[str]:
    try:
        ranks = range(len(checkpoint.manifest.parts))
        names = {part_name(rank, "bin"): rank for rank in ranks}
        there = checkpoint.folder.sizes(names) if parts_here else names
        return checkpoint.verify([rank for name, rank in names.items() if name in there])
    except StokerError as error:
        return [error.message]


# --- clearing up --------------------------------------------------------------------------------------


def sort_out(tiers: Tiers, *, keep: int) -> dict[str, list[Garbage]]:
    """What may go, in both tiers, and what is left alone; nothing is deleted. With `keep` the newest are
    read, every byte, until so many good ones are found."""
    found: dict[str, list[Garbage]] = {
        "garbage": garbage(tiers.root),
        "superseded": [],
        "left_alone": left_alone(tiers.root),
    }
    _sort_out_tier(tiers, found, LOCAL, local_names(tiers.root), keep)
    if tiers.remote is not None:
        folders = remote_folders(tiers.remote)
        names = newest_first(name for name, folder in folders.items() if folder.sizes([MANIFEST]))
        _sort_out_tier(tiers, found, REMOTE, names, keep)
        uploads = [replace(one, tier=REMOTE) for one in remote_garbage(tiers.remote)]
        found["garbage"] += uploads
        known = {*names, *(one.name for one in uploads)}
        why = "an upload without a manifest, newer than every whole one: it may be under way"
        rest = [Garbage(name=name, tier=REMOTE, bytes=0, why=why) for name in folders if name not in known]
        found["left_alone"] += rest
    return found


def _sort_out_tier(
    tiers: Tiers, found: dict[str, list[Garbage]], tier: str, names: list[str], keep: int
) -> None:
    @cache
    def faults(name: str) -> str:
        folder: Any = LocalFolder(tiers.root / name)
        if tiers.remote is not None:
            far = RemoteFolder(tiers.remote, name)
            folder = far if tier == REMOTE else BothTiers(folder, far)
        return "; ".join(_faults(Checkpoint(folder), parts_here=False)[:1])

    def good(name: str) -> bool:
        if why := faults(name):
            why = f"it does not count among the {keep} that are kept: {why}"
            found["left_alone"].append(Garbage(name=name, tier=tier, bytes=0, why=why))
        return not why

    why, pins = "newer ones, which were read back, stand in for it", dict[str, str]()
    if keep and tier == LOCAL:
        pins = spared_here(tiers.root, names, ONLY_PINS)
    elif keep and tiers.remote is not None:
        pins = spared_there(tiers.remote, names, ONLY_PINS, root=tiers.root)
    for name in expired(names, keep=keep, good=good, proven=lambda name: not faults(name), spare=pins):
        found["superseded"].append(Garbage(name=name, tier=tier, bytes=0, why=why))


def clear(tiers: Tiers, found: Mapping[str, list[Garbage]]) -> None:
    """Delete what was sorted out."""
    collect(tiers.root)
    for one in (*found["garbage"], *found["superseded"]):
        if one.tier == REMOTE:
            assert tiers.remote is not None
            remove_remote(tiers.remote, one.name)
        elif one in found["superseded"]:
            remove_local(tiers.root, one.name)
