"""Staging plan and eviction order: what to bring, where it goes, what gives way. Pure.

A *unit* is what one process fetches under one lease: a large file alone, or a bundle of small ones. Units
depend on the collection only, never on who asks or in which order, so that everybody who shares a cache
folder cuts the same work into the same pieces.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Collection as Names
from dataclasses import dataclass, field, replace
from urllib.parse import urlsplit

import xxhash

from stoker.errors import UsageError
from stoker.stage.landing.digest import BlockDigests
from stoker.stage.origins.hub import HubPath, parse_hub
from stoker.stage.origins.origin import Collection, RemoteFile

SMALL_BYTES = 8 << 20  # a file up to this size travels whole and shares lease and sync with others
BUNDLE_BYTES = 64 << 20
BUNDLE_FILES = 1024
NAME_BYTES = 255  # what Linux filesystems allow for one name

# What a reader needs before anything else: alone in a unit, so that it waits for nothing else.
BLOCKS = "blocks.xxh3"
FIRST = ("manifest.json", BLOCKS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Files that are fetched together: `folder` is where they go, below the cache's folder."""

    key: str
    folder: str
    files: tuple[RemoteFile, ...]
    # of each file, where their origin tells them; see `blocks`
    blocks: tuple[BlockDigests, ...] = field(default=(), compare=False, repr=False)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def is_bundle(self) -> bool:
        return all(file.bytes <= SMALL_BYTES for file in self.files)

    def same_content(self, other: Unit) -> bool:
        """Whether both mean the very same bytes; a file that changed at its origin does not."""
        return self.folder == other.folder and [content_of(f) for f in self.files] == [
            content_of(f) for f in other.files
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """What a unit that lies in the cache takes, when it was last used, and who holds it now."""

    key: str
    bytes: int
    used_at: float
    holders: tuple[str, ...] = ()


def units_of(collection: Collection, *, folder: str) -> tuple[Unit, ...]:
    """Cut a collection into units: what is needed first, then large files alone and small ones bundled."""
    first = [file for file in collection.files if file.name in FIRST]
    rest = [file for file in collection.files if file.name not in FIRST]
    return tuple(_unit(folder, group) for group in (*_groups(first), *_groups(rest)))


def in_order(units: Sequence[Unit], names: Iterable[str]) -> list[Unit]:
    """The units that hold these files, each once, in the order in which the names first ask for them."""
    holder = {file.name: unit for unit in units for file in unit.files}
    wanted = list(dict.fromkeys(names))
    unknown = [name for name in wanted if name not in holder]
    if unknown:
        raise UsageError(
            f"there is no {unknown[0]} here", hint=f"one of {', '.join(sorted(holder)[:5])}, ..."
        )
    return list(dict.fromkeys(holder[name] for name in wanted))


def evictions(
    holdings: Sequence[Holding],
    *,
    need_bytes: int,
    keep: Names[str] = (),
    next_use: Callable[[str], float] = lambda key: math.inf,
) -> tuple[str, ...] | None:
    """Which units give way so that at least `need_bytes` come free, and never one that somebody holds: what
    is needed last goes first, and of what nobody is known to need the longest unused. None if that cannot be:
    then nothing should go, for nothing would come of it."""
    if need_bytes <= 0:
        return ()
    free, going = 0, []
    for held in sorted(holdings, key=lambda held: (-next_use(held.key), held.used_at, held.key)):
        if held.holders or held.key in keep:
            continue
        going.append(held)
        free += held.bytes
        if free >= need_bytes:
            return tuple(held.key for held in _without_spare(going, free - need_bytes))
    return None


def evictions_ahead(
    holdings: Sequence[Holding],
    *,
    need_bytes: int,
    next_use: Callable[[str, float], float],
    at: float,
    keep: Names[str] = (),
    foreseen: Callable[[str], bool] = lambda key: True,
) -> tuple[str, ...] | None:
    """Which units give way already for one that is needed only `at` some distance: those that would then, by
    their next use beyond it. None while one of them is read, or will be before: another in its place would
    have to come again. What somebody holds who is not foreseen to let go of it stays out of this."""
    may = [replace(held, holders=()) for held in holdings if not held.holders or foreseen(held.key)]
    going = evictions(may, need_bytes=need_bytes, keep=keep, next_use=lambda key: next_use(key, at))
    free = {held.key for held in holdings if not held.holders and next_use(held.key, -math.inf) > at}
    return going if going is not None and free.issuperset(going) else None


def folder_of(collection: Collection, *, hub_cache: bool = False) -> str:
    """Where a collection lies below the cache's folder, under a name that a person can read:
    `s3/bucket/prefix`, `https/host/path`, `hub/models/org/name/COMMIT`, `local/mnt/nfs/corpus`."""
    if collection.kind == "hub":
        return _hub_folder(collection, hub_cache=hub_cache)
    if "://" not in collection.url:
        return "/".join(["local", *safe_parts(_above(collection, collection.url))])
    scheme, _, rest = collection.url.partition("://")
    if not scheme.startswith("http"):  # a key may hold ? and #, and abfss://container@account is two names
        return "/".join([scheme.lower(), *safe_parts(_above(collection, rest))])
    parts = urlsplit(collection.url)
    path = _above(collection, parts.path)
    tail = [_digest(parts.query)[:8]] if parts.query else []
    return "/".join([parts.scheme, *safe_parts(f"{parts.netloc.rpartition('@')[2]}/{path}"), *tail])


def content_digest(collection: Collection) -> str:
    """What tells two versions of a collection apart, short enough for a folder's name."""
    return _digest("\0".join(str(content_of(file)) for file in collection.files))[:12]


def is_one_file(collection: Collection) -> bool:
    """Whether its URL names a file, and not a folder, also one with a single file in it."""
    if collection.kind != "hub":
        return collection.kind == "file"
    place = parse_hub(collection.url)
    return any(parse_hub(file.url).path == place.path for file in collection.files)


def hub_cache_folder(place: HubPath) -> str:
    """The folder of a repository in a Hugging Face cache: `models--org--name`."""
    return f"{place.kind}s--{place.repo.replace('/', '--')}"


def safe_parts(path: str) -> list[str]:
    """The parts of a path as file names: nothing that climbs, hides among our own, or is too long."""
    return [_safe(part) for part in path.split("/") if part]


def _above(collection: Collection, path: str) -> str:
    """The folder: a single file lies in the one its path names."""
    return path.rpartition("/")[0] if is_one_file(collection) else path


def _hub_folder(collection: Collection, *, hub_cache: bool) -> str:
    place = parse_hub(collection.url)
    below = safe_parts(_above(collection, place.path))
    if hub_cache:  # as huggingface_hub lays it out, so that its readers find it offline
        return "/".join([hub_cache_folder(place), "snapshots", *safe_parts(collection.revision), *below])
    where = [*safe_parts(place.repo), *safe_parts(collection.revision)]  # a server's word too
    return "/".join(["hub", f"{place.kind}s", *where, *below])


def _safe(part: str) -> str:
    if part in (".", "..", ".stoker"):
        return f"%{part}"
    part = part.replace("\0", "%00")
    if len(os.fsencode(part)) <= NAME_BYTES:
        return part
    return os.fsencode(part)[: NAME_BYTES - 20].decode(errors="ignore") + "~" + _digest(part)


def key_of(folder: str, names: Sequence[str]) -> str:
    """What a unit of these files is called in the books: readable, and only ever of these."""
    readable = re.sub(r"[^A-Za-z0-9._-]", "_", names[0].rpartition("/")[2])[:60].lstrip(".")
    return f"{readable}-{_digest(chr(0).join([folder, *names]))}"


def _unit(folder: str, files: Sequence[RemoteFile]) -> Unit:
    return Unit(key=key_of(folder, [file.name for file in files]), folder=folder, files=tuple(files))


def _groups(files: Sequence[RemoteFile]) -> list[list[RemoteFile]]:
    large = [[file] for file in files if file.bytes > SMALL_BYTES]
    return large + _bundles(file for file in files if file.bytes <= SMALL_BYTES)


def _bundles(files: Iterable[RemoteFile]) -> list[list[RemoteFile]]:
    bundles: list[list[RemoteFile]] = []
    room = -1
    for file in files:
        if room < file.bytes or len(bundles[-1]) == BUNDLE_FILES:
            bundles.append([])
            room = BUNDLE_BYTES
        bundles[-1].append(file)
        room -= file.bytes
    return bundles


def content_of(file: RemoteFile) -> tuple[str, int, str]:
    """What tells two versions of a file apart."""
    # with a digest the version says nothing more: the same bytes uploaded again are the same bytes
    return file.name, file.bytes, file.digest or file.version


def _without_spare(going: Sequence[Holding], spare: int) -> list[Holding]:
    """Leave what is not needed after all, what would go last first."""
    kept = []
    for held in reversed(going):
        if held.bytes <= spare:
            spare -= held.bytes
        else:
            kept.append(held)
    return kept[::-1]


def _digest(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(os.fsencode(text))
