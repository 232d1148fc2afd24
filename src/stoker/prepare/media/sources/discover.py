"""Media discovery: whether names hold media or text, and what samples there are in them.

A name holds media if most of what it holds is: loose files count by themselves, a table or tar as the first
one of that kind. Captions beside an image are part of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from stoker.errors import UsageError
from stoker.formats.sizes import counted
from stoker.prepare.media.recipe import MediaOptions
from stoker.prepare.media.sources import tables
from stoker.prepare.media.sources.contents import Contents, contents_of, each_once
from stoker.prepare.media.sources.kinds import kind_of, suffix_of
from stoker.prepare.media.sources.listing import (
    Listing,
    has_class_folders,
    labelled,
    split_folder,
    splits_among_others,
)
from stoker.prepare.sources.discover import Look
from stoker.prepare.sources.documents import Source
from stoker.storage import join_url, named_errors

_SHOWN = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Media sources, the listings of those that are folders, and the names of classes in their order."""

    sources: list[Source]
    listings: dict[int, Listing] = field(default_factory=dict)
    classes: tuple[str, ...] = ()


def find_media(names: Sequence[str], options: MediaOptions, look: Look, *, tokenizer: str) -> Found | None:
    """The media behind these names; None where they hold text, which has its tokenizer."""
    if options.kind == "text":
        return None
    held = []
    for name in names:
        with named_errors("read", name):
            one = contents_of(name, look)
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
    return _found(each_once(held), options, look)


def _check_meant(sources: Sequence[Source]) -> None:
    """A table with a text and an image in each row is a corpus to one and captioned images to another."""
    if any(columns.caption == "text" for columns in _columns(sources)):
        raise UsageError(
            "the tables have a column of text and one of media",
            hint="--kind text tokenises the text alone; --kind media makes samples of both",
        )


def _is_mostly_media(one: Contents, options: MediaOptions, tokenizer: str) -> bool:
    if options.kind == "media" or not one.media:
        return one.media > 0
    if not tokenizer:  # text could not be prepared at all: shards beside their side files are meant
        return bool(one.tables) or one.media >= one.texts
    return one.media > one.texts + one.plain_tables


def _found(held: list[Contents], options: MediaOptions, look: Look) -> Found:
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
