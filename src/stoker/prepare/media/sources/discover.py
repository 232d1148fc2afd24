"""Media discovery: whether names hold media or text, and what samples there are in them.

A name holds media if most of what it holds is: loose files count by themselves, a table or tar as the first
one of that kind. Captions beside an image are part of it.
"""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from stoker.errors import UnreadableError, UsageError
from stoker.formats.sizes import counted
from stoker.prepare.media.recipe import MediaOptions
from stoker.prepare.media.sources import tables, tars
from stoker.prepare.media.sources.kinds import kind_of, suffix_of
from stoker.prepare.media.sources.listing import (
    CLASSES,
    METADATA,
    Listing,
    described,
    has_class_folders,
    labelled,
    list_samples,
    read_classes,
    read_metadata,
    split_folder,
    splits_among_others,
)
from stoker.prepare.sources.discover import GLOB_MARKS, Look, behind, is_there, matches, only_file
from stoker.prepare.sources.documents import Source
from stoker.prepare.sources.tables import is_saved_dataset
from stoker.storage import (
    Entry,
    LocalStore,
    is_local,
    join_url,
    local_path,
    named_errors,
    open_store,
    url_scheme,
)

_TABLES = ("parquet", "arrow", "saved", "hub", "webdataset")
_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Media sources, the listings of those that are folders, and the names of classes in their order."""

    sources: list[Source]
    listings: dict[int, Listing] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Name:
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


def find_media(names: Sequence[str], options: MediaOptions, look: Look, *, tokenizer: str) -> Found | None:
    """The media behind these names; None where they hold text, which has its tokenizer."""
    if options.kind == "text":
        return None
    held = []
    for name in names:
        with named_errors("read", name):
            one = _held(name, look)
        if options.kind == "media":
            plain = one.plain_tables - len(one.unknown)
            one = replace(one, tables=(*one.tables, *one.unknown), plain_tables=plain)
        held.append(one)
    kinds = {one.name: _is_mostly_media(one, options, tokenizer) for one in held}
    if not any(kinds.values()):
        if options.kind == "media":
            raise UsageError(f"{', '.join(names)} hold no media", hint="leave --kind media out for text")
        return None
    if not all(kinds.values()):
        text = next(name for name, is_media in kinds.items() if not is_media)
        media = next(name for name, is_media in kinds.items() if is_media)
        raise UsageError(
            f"{media} holds media and {text} text",
            hint="prepare them into a dataset each, or say which is meant with --kind text or --kind media",
        )
    if tokenizer and options.kind == "auto":
        _check_meant([source for one in held for source in one.tables])
    return _found(_each_once(held), options, look)


def _check_meant(sources: Sequence[Source]) -> None:
    """A table with a text and an image in each row is a corpus to one and captioned images to another."""
    if any(columns.caption == "text" for columns in _columns(sources)):
        raise UsageError(
            "the tables have a column of text and one of media",
            hint="--kind text tokenises the text alone; --kind media makes samples of both",
        )


def _is_mostly_media(one: _Name, options: MediaOptions, tokenizer: str) -> bool:
    if options.kind == "media" or not one.media:
        return one.media > 0
    if not tokenizer:  # text could not be prepared at all: shards beside their side files are meant
        return bool(one.tables) or one.media >= one.texts
    return one.media > one.texts + one.plain_tables


def _found(held: list[_Name], options: MediaOptions, look: Look) -> Found:
    sources: list[Source] = []
    listings: dict[int, Listing] = {}
    with_classes = _with_classes([one.listing for one in held if one.listing], options, look)
    for one in held:
        listing = with_classes.pop(0) if one.listing else None
        if listing and listing.samples:
            listings[len(sources)] = listing
            sources.append(_source(listing, one.name))
        sources += [replace(source, origin=one.name) for source in one.tables]
        if one.plain_tables:
            look.say(f"{one.name}: {counted(one.plain_tables, 'table')} without media left out")
        if one.tables:
            look.say(f"{one.name}: media, not text: {_counted_tables(one.tables)}")
    for listing in listings.values():
        _tell(listing, look.say)
    folders = tuple(
        sorted({sample.label for one in listings.values() for sample in one.samples if sample.label})
    )
    named = [columns.classes for columns in _columns(sources) if columns.classes]
    named += [one.classes for one in held if one.classes and one.tables]
    if any(classes != (folders or named[0]) for classes in named):
        raise UsageError(
            "the sources name different classes, or name them in another order",
            hint="prepare them into a dataset each, or leave labels out with --labels none",
        )
    return Found(sources=sources, listings=listings, classes=folders or (named[0] if named else ()))


def _columns(sources: Sequence[Source]) -> Iterator[tables.Columns]:
    for kind in ("parquet", "arrow", "saved", "hub"):
        first = next((source for source in sources if source.kind == kind), None)
        schema = tables.schema_of(first) if first else None
        if schema is not None:
            yield tables.columns_of(schema)


def _source(listing: Listing, name: str) -> Source:
    return Source(
        url=listing.base,
        kind="listing",
        bytes=max(1, listing.bytes),
        units=len(listing.samples),
        version=listing.digest,
        origin=name,
    )


def _with_classes(listings: list[Listing], options: MediaOptions, look: Look) -> list[Listing]:
    """Folders as classes where all of them mean that."""
    cut = [_wanted_split(one, look) for one in listings]
    are_classes = options.labels == "folders" or (
        options.labels == "auto" and bool(cut) and all(map(has_class_folders, cut))
    )
    return [labelled(one) if are_classes else one for one in cut]


def _wanted_split(listing: Listing, look: Look) -> Listing:
    """Of a folder of train/ and val/, the split that is asked for."""
    above, chosen, all_splits = split_folder(listing, look.split)
    if not all_splits:
        if mixed := splits_among_others(listing):
            look.say(
                f"{listing.base}: {' and '.join(mixed)} are taken together with all else that lies there"
            )
        return listing
    where = join_url(listing.base, above) if above else listing.base
    if not chosen:
        raise UsageError(
            f"{where} has the splits {', '.join(all_splits)}, and not {look.split}",
            hint="choose one with --split",
        )
    if len(chosen) > 1:
        raise UsageError(
            f"{where} has several splits {look.split}: {', '.join(chosen)}",
            hint=f"choose one by its name: --split {chosen[0]}",
        )
    look.say(f"{where}: split {chosen[0]}/ of {', '.join(all_splits)} (--split takes another)")
    folder = f"{above}/{chosen[0]}" if above else chosen[0]
    inside = [
        replace(one, files=tuple(replace(f, path=f.path.removeprefix(f"{folder}/")) for f in one.files))
        for one in listing.samples
        if one.files[0].path.startswith(f"{folder}/")
    ]
    beside = tuple(one.files[0].path for one in listing.samples if _is_beside(one.files[0].path, above))
    alone = (*listing.alone, *beside)
    return Listing(base=join_url(listing.base, folder), samples=tuple(inside), alone=alone)


def _is_beside(path: str, above: str) -> bool:
    """Whether a file lies beside the folders of splits, in none of them."""
    return "/" not in path.removeprefix(f"{above}/" if above else "")


def _counted_tables(sources: Sequence[Source]) -> str:
    tarred = sum(source.kind == "webdataset" for source in sources)
    both = ((len(sources) - tarred, "table"), (tarred, "tar"))
    return ", ".join(counted(count, what) for count, what in both if count)


def _tell(listing: Listing, say: Callable[[str], None]) -> None:
    kinds = Counter(kind_of(suffix_of(sample.files[0].path)) for sample in listing.samples)
    classes = {sample.label for sample in listing.samples} - {""}
    told = ", ".join(counted(count, f"{kind} file") for kind, count in kinds.most_common())
    captions = f", {listing.captioned:,} with captions" if listing.captioned else ""
    labels = f" in {counted(len(classes), 'class folder')}" if classes else ""
    say(f"{listing.base}: media, not text: {told}{labels}{captions}")
    if listing.alone:
        kinds = Counter(PurePosixPath(path).suffix or PurePosixPath(path).name for path in listing.alone)
        some = ", ".join(sorted(kinds)[:_SHOWN]) + (", ..." if len(kinds) > _SHOWN else "")
        say(f"{listing.base}: {counted(len(listing.alone), 'file')} in no sample left out ({some})")


def _held(name: str, look: Look) -> _Name:
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


def _of_glob(name: str, pattern: str, look: Look) -> _Name:
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


def _of_entries(name: str, base: str, entries: list[Entry], look: Look) -> _Name:
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


def _of_tables(name: str, sources: list[Source]) -> _Name:
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
    return _Name(name=name, tables=tuple(media), plain_tables=plain, unknown=tuple(unknown))


def _is_media(source: Source) -> bool:
    if source.kind == "webdataset":
        return tars.holds_media(source)
    return tables.holds_media(source)


def _table_kind(path: str) -> bool:
    plain = PurePosixPath(path.lower())
    if plain.suffix in (".gz", ".zst", ".xz", ".bz2"):
        plain = plain.with_suffix("")
    return plain.suffix in (".tar", ".parquet", ".arrow", ".feather", ".ipc")


def _each_once(held: list[_Name]) -> list[_Name]:
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
