"""Contents of a name: what lies behind a folder, file, glob or URL; media, text and tables told apart."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from stoker.errors import UnreadableError, UsageError
from stoker.formats.sizes import counted
from stoker.prepare.media.sources import tables, tars
from stoker.prepare.media.sources.kinds import kind_of, suffix_of
from stoker.prepare.media.sources.listing import (
    CLASSES,
    METADATA,
    Listing,
    described,
    list_samples,
    read_classes,
    read_metadata,
)
from stoker.prepare.sources.discover import GLOB_MARKS, Look, behind, is_there, matches, only_file
from stoker.prepare.sources.documents import Source
from stoker.prepare.sources.tables import is_saved_dataset
from stoker.storage import Entry, LocalStore, is_local, join_url, local_path, open_store, url_scheme

_TABLES = ("parquet", "arrow", "saved", "hub", "webdataset")


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """What one name holds."""

    name: str
    listing: Listing | None = None
    tables: tuple[Source, ...] = ()
    texts: int = 0
    plain_tables: int = 0  # tables and tars without media
    unknown: tuple[Source, ...] = ()  # those of them with bytes of no known kind
    classes: tuple[str, ...] = ()  # names that a dataset of ours says

    @property
    def media(self) -> int:
        return len(self.listing.samples if self.listing else ()) + len(self.tables)


def contents_of(name: str, look: Look) -> Contents:
    """What is behind a name, told apart."""
    if url_scheme(name) == "hf":
        return _of_tables(name, behind(name, look))
    if is_local(name):
        path = local_path(name).absolute()
        if is_there(path) and path.is_dir():
            if is_saved_dataset(path):
                return _of_tables(name, behind(name, look))
            return _of_entries(name, str(path), list(_below(path, look)), look)
        if is_there(path):
            return _of_entries(name, str(path.parent), [open_store(path.parent).stat(path.name)], look)
        if GLOB_MARKS & set(str(path)):
            return _of_glob(name, str(path), look)
        raise UnreadableError(f"{name} does not exist", hint="check the path, and quote globs with **")
    base, entries = _remote(name, look)
    return _of_entries(name, base, [entry for entry in entries if not _is_hidden(entry.path)], look)


def _of_glob(name: str, pattern: str, look: Look) -> Contents:
    base = pattern[: min(pattern.index(mark) for mark in GLOB_MARKS if mark in pattern)].rpartition("/")[0]
    paths = sorted(path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path))
    store = open_store(base or "/")
    return _of_entries(
        name, base or "/", [store.stat(os.path.relpath(path, base or "/")) for path in paths], look
    )


def _remote(name: str, look: Look) -> tuple[str, list[Entry]]:
    if GLOB_MARKS & set(name):
        base = name[: min(name.index(mark) for mark in GLOB_MARKS if mark in name)].rpartition("/")[0]
        pattern = name.removeprefix(base).lstrip("/")
        return base, [entry for entry in open_store(base).list() if matches(entry.path, pattern)]
    if look.is_text(name) or _table_kind(name) or kind_of(suffix_of(name)):
        return only_file(name)
    return name.rstrip("/"), list(open_store(name).list())


def _below(path: Path, look: Look) -> Iterator[Entry]:
    """Every file, links followed; what is hidden, no file or a link to nothing is told."""
    left: Counter[str] = Counter()

    def leave_out(_: str, why: str) -> None:
        left[why] += 1

    hidden = 0
    for entry in LocalStore(path).list_through_links(leave_out):
        if _is_hidden(entry.path):
            hidden += 1
        else:
            yield entry
    for why, count in (*sorted(left.items()), ("hidden", hidden)):
        if count:
            look.say(f"{path}: {counted(count, 'file')} left out ({why})")


def _is_hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _of_entries(name: str, base: str, entries: list[Entry], look: Look) -> Contents:
    if look.out and base.rstrip("/") == look.out:
        raise UsageError(
            f"{base} is a source and --out at once", hint="choose another --out; it may be a folder inside"
        )
    seen = [one for one in entries if not (look.out and join_url(base, one.path).startswith(f"{look.out}/"))]
    loose = list_samples(base, [one for one in seen if not _table_kind(one.path)])
    of_tables = [one for one in seen if _table_kind(one.path)]
    sources = look.sources(base, of_tables)
    if loose.samples:
        loose = described(loose, _said(base, [one.path for one in seen], look.say))
    held = replace(_of_tables(name, sources), listing=loose if loose.samples else None)
    if held.tables and any(one.path == CLASSES for one in seen):
        held = replace(held, classes=read_classes(open_store(base).read(CLASSES)))
    # beside media a .json is about them: img2dataset's statistics, our own manifest
    texts = [
        path for path in loose.alone if look.is_text(path) and not (held.media and path.endswith(".json"))
    ]
    return replace(held, texts=len(texts))


def _said(base: str, paths: list[str], say: Callable[[str], None]) -> dict[str, str]:
    """What every metadata.jsonl or .csv says of the files beside it."""
    store = open_store(base)
    said: dict[str, str] = {}
    for path in paths:
        if PurePosixPath(path).name in METADATA:
            found = read_metadata(path, store.read(path))
            if not found:
                say(f"{join_url(base, path)} has no file_name: left out")
            said |= found
    if absent := sorted(said.keys() - set(paths)):
        say(f"{base}: {counted(len(absent), 'file')} that metadata names is not there ({absent[0]}, ...)")
    return said


def _of_tables(name: str, sources: list[Source]) -> Contents:
    """Tables and tars of one kind are what the first of them is."""
    media: list[Source] = []
    unknown: list[Source] = []
    plain = 0
    for kind in _TABLES:
        some = [source for source in sources if source.kind == kind]
        if some and _is_media(some[0]):
            media += some
        else:
            plain += len(some)
            if some and kind != "webdataset" and tables.is_bytes_at_all(some[0]):
                unknown += some
    return Contents(name=name, tables=tuple(media), plain_tables=plain, unknown=tuple(unknown))


def _is_media(source: Source) -> bool:
    if source.kind == "webdataset":
        return tars.holds_media(source)
    return tables.holds_media(source)


def _table_kind(path: str) -> bool:
    plain = PurePosixPath(path.lower())
    if plain.suffix in (".gz", ".zst", ".xz", ".bz2"):
        plain = plain.with_suffix("")
    return plain.suffix in (".tar", ".parquet", ".arrow", ".feather", ".ipc")


def each_once(held: list[Contents]) -> list[Contents]:
    """Two spellings of a place, or a folder and one inside it, give each file once: to the first name."""
    taken: set[tuple[str, str]] = set()
    once = []
    for one in held:
        listing = one.listing
        if listing:
            places = _places(listing)
            fresh = [one for one, place in zip(listing.samples, places, strict=True) if place not in taken]
            taken.update(places)
            listing = replace(listing, samples=tuple(fresh))
        new = [source for source in one.tables if _table_place(source) not in taken]
        taken.update(map(_table_place, new))
        once.append(replace(one, listing=listing, tables=tuple(new)))
    return once


def _table_place(source: Source) -> tuple[str, str]:
    return (os.path.realpath(local_path(source.url)) if is_local(source.url) else source.url, source.part)


def _places(listing: Listing) -> list[tuple[str, str]]:
    """Where each sample lies, in one spelling."""
    folders: dict[str, str] = {}  # resolved once each: a folder may hold a million files

    def resolved(folder: str) -> str:
        full = join_url(listing.base, folder)
        return os.path.realpath(local_path(full)) if is_local(full) else full

    places = []
    for sample in listing.samples:
        folder, _, name = sample.files[0].path.rpartition("/")
        if folder not in folders:
            folders[folder] = resolved(folder)
        places.append((folders[folder], name))
    return places
