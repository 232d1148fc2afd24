"""Input discovery: from files, folders, globs and URLs to a sorted list of sources, cut into splits."""

from __future__ import annotations

import glob
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from stoker.errors import UnreadableError, UsageError
from stoker.formats.sizes import counted
from stoker.prepare.sources import tables
from stoker.prepare.sources.arrays import is_unfolded
from stoker.prepare.sources.documents import Piece, Source
from stoker.prepare.sources.lines import decompression_errors, open_plain
from stoker.storage import (
    Entry,
    is_local,
    join_url,
    local_path,
    named_errors,
    open_store,
    split_url,
    url_scheme,
)

_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".csv": "csv",
    ".tsv": "tsv",
    ".warc": "warc",
    ".wet": "warc",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".tar": "webdataset",
}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
GLOB_MARKS = set("*?[")
_KINDS_SHOWN = 5


def discover(
    names: Sequence[str],
    *,
    lines: bool = False,
    split: str = "train",
    out: str = "",
    say: Callable[[str], None] = lambda text: None,
) -> list[Source]:
    """Every source behind these names, each once, in the order of the names and then of the paths. What
    is made in `out` is no source of the folder around it; files of no known kind are told to `say`."""
    sources: dict[tuple[str, str], Source] = {}
    look = look_at(lines=lines, split=split, out=out, say=say)
    for name in names:
        with named_errors("read", name):
            found = behind(name, look)
        if not found:
            raise UnreadableError(f"{name} holds nothing to read", hint=f"it may hold {_readable()} files")
        for source in found:
            named = replace(source, origin=name)
            sources.setdefault((_spelled_once(source.url), source.part), named)
    return list(sources.values())


def _spelled_once(url: str) -> str:
    """One spelling of a place: `a/../b`, a link to `b` and `b` are the same file, to be read once."""
    return os.path.realpath(local_path(url)) if is_local(url) else url


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How to look at a name."""

    lines: bool
    split: str
    out: str
    say: Callable[[str], None]

    def sources(self, base: str, entries: list[Entry]) -> list[Source]:
        """These files of a folder, as sources."""
        return _sources(base, entries, self)

    def is_text(self, path: str) -> bool:
        """Whether a file of this name is read as text."""
        return _kind(path) in ("jsonl", "text")


def look_at(*, lines: bool, split: str, out: str, say: Callable[[str], None]) -> Look:
    """How to look at the names of a command."""
    return Look(lines=lines, split=split, out=_absolute(out), say=say)


def cut(sources: Sequence[Source], *, split_bytes: int) -> list[tuple[Piece, ...]]:
    """Pieces of about `split_bytes`, packed into splits: a large source is cut, small ones share."""
    splits: list[tuple[Piece, ...]] = []
    pending: list[Piece] = []
    pending_bytes = 0
    for number, source in enumerate(sources):
        parts = max(1, min(source.units, round(source.bytes / split_bytes)))
        bounds = [source.units * part // parts for part in range(parts + 1)]
        for start, stop in itertools.pairwise(bounds):
            pending.append(Piece(source=number, start=start, stop=stop))
            pending_bytes += source.bytes // parts
            if pending_bytes >= split_bytes * 3 // 4:
                splits.append(tuple(pending))
                pending, pending_bytes = [], 0
    if pending:
        splits.append(tuple(pending))
    return splits


def behind(name: str, look: Look) -> list[Source]:
    """The sources that a name stands for."""
    if url_scheme(name) == "hf":
        return tables.hub_sources(name.removeprefix("hf://"), look.split)
    if is_local(name):
        path = local_path(name).absolute()  # tasks may run in another folder, or on another machine
        if is_there(path) and path.is_dir():
            if tables.is_saved_dataset(path):
                return tables.saved_sources(path, look.split)
            return _folder(str(path), _entries_below(path), look)
        if is_there(path):
            return _sources(*only_file(str(path)), look)
        if GLOB_MARKS & set(str(path)):
            matches = sorted(glob.glob(str(path), recursive=True))
            return [source for match in matches if not Path(match).is_dir() for source in behind(match, look)]
        raise UnreadableError(f"{name} does not exist", hint="check the path, and quote globs with **")
    return _remote(name, look)


def _absolute(url: str) -> str:
    return str(local_path(url).absolute()) if url and is_local(url) else url.rstrip("/")


def _folder(base: str, entries: list[Entry], look: Look) -> list[Source]:
    """What a folder or prefix holds, without what is hidden in it, and without what we make there."""
    base = base.rstrip("/")
    if base == look.out:
        raise UsageError(
            f"{base} is a source and --out at once", hint="choose another --out; it may be a folder inside"
        )
    seen = [
        entry
        for entry in entries
        if not any(part.startswith(".") for part in entry.path.split("/"))
        and not (look.out and join_url(base, entry.path).startswith(f"{look.out}/"))
    ]
    unknown = [entry.path for entry in seen if not _kind(entry.path)]
    if unknown:
        kinds = sorted({Path(path).suffix or Path(path).name for path in unknown})
        some = ", ".join(kinds[:_KINDS_SHOWN]) + (", ..." if len(kinds) > _KINDS_SHOWN else "")
        look.say(f"{base}: {counted(len(unknown), 'file')} of no known kind left out ({some})")
    return _sources(base, [entry for entry in seen if _kind(entry.path)], look)


def _entries_below(root: Path) -> list[Entry]:
    store = open_store(root)
    return [store.stat(path.relative_to(root).as_posix()) for path in _files_below(root)]


def _files_below(folder: Path, above: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Every file, also behind links to folders: datasets are often gathered with those. A link to a
    folder that it lies in is not followed again."""
    facts = folder.stat()
    here = (facts.st_dev, facts.st_ino)
    if here in above:
        return
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            yield from _files_below(Path(entry.path), (*above, here))
        else:
            yield Path(entry.path)


def is_there(path: Path) -> bool:
    """Unlike Path.exists, this tells a missing file from one behind a closed folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _remote(name: str, look: Look) -> list[Source]:
    if GLOB_MARKS & set(name):
        fixed = name[: min(name.index(mark) for mark in GLOB_MARKS if mark in name)].rpartition("/")[0]
        pattern = name.removeprefix(fixed).lstrip("/")
        entries = [entry for entry in open_store(fixed).list() if matches(entry.path, pattern)]
        return _sources(fixed, entries, look)
    if _kind(name):
        return _sources(*only_file(name), look)
    return _folder(name, list(open_store(name).list()), look)


def matches(path: str, pattern: str) -> bool:
    """As a shell has it, and glob for local files: a star stays in its folder, two stars do not."""
    wanted, _, deeper = pattern.partition("/")
    name, _, rest = path.partition("/")
    if wanted == "**":
        return not deeper or matches(path, deeper) or (bool(rest) and matches(rest, pattern))
    return bool(rest) == bool(deeper) and fnmatchcase(name, wanted) and (not rest or matches(rest, deeper))


def only_file(url: str) -> tuple[str, list[Entry]]:
    """One file, and the folder it is in."""
    folder, path = split_url(url)
    return folder, [open_store(folder).stat(path)]


def _sources(base: str, entries: list[Entry], look: Look) -> list[Source]:
    sources = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        url = join_url(base, entry.path)
        kind, compression = _kind(entry.path), _compression(entry.path)
        if not kind:
            raise UnreadableError(
                f"{url}: cannot tell what kind of file this is", hint=f"use {_readable()} names"
            )
        source = Source(
            url=url, kind=kind, bytes=entry.bytes, units=1, version=entry.version, compression=compression
        )
        if kind == "jsonl" and _is_unfolded(source):
            source = replace(source, kind="json")
        units = _units(url, source.kind, compression, entry.bytes, look.lines)
        sources.append(replace(source, units=units))
    return sources


_HEAD = 4096  # where white space before an array ends


def _is_unfolded(source: Source) -> bool:
    """A `.json` file may be lines, as others call `.jsonl`, or one array: its first bytes say so."""
    if Path(source.url.lower().removesuffix(f".{source.compression}")).suffix != ".json":
        return False
    with open_plain(source) as file:
        try:
            return is_unfolded(file.read(_HEAD))
        except decompression_errors():  # told by whoever reads it
            return False


def _units(url: str, kind: str, compression: str, size: int, lines: bool) -> int:
    if kind in ("parquet", "arrow") and not compression:
        return tables.units(url, kind)
    if not compression and (kind == "jsonl" or (kind == "text" and lines)):
        return max(1, size)
    return 1


def _kind(path: str) -> str:
    plain = Path(path.lower())
    return _KINDS.get((plain.with_suffix("") if plain.suffix in _COMPRESSIONS else plain).suffix, "")


def _compression(path: str) -> str:
    return _COMPRESSIONS.get(Path(path).suffix.lower(), "")


def _readable() -> str:
    return ", ".join(_KINDS) + " (also .gz, .zst, .xz, .bz2)"


def check_reading(sources: Sequence[Source], *, lines: bool) -> None:
    """`--lines` is about text files: refuse it where it would do nothing."""
    if lines and not any(source.kind == "text" for source in sources):
        raise UsageError("--lines was given, but no source is a .txt file", hint="leave --lines out")
