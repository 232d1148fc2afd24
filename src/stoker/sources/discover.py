"""From what the user names (files, folders, globs, URLs) to a sorted list of sources, cut into splits."""

from __future__ import annotations

import glob
import itertools
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path

from stoker.errors import BadInputError, UsageError
from stoker.sources import tables
from stoker.sources.documents import Piece, Source
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
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".tar": "webdataset",
}
_COMPRESSIONS = {".gz": "gz", ".zst": "zst"}
_GLOB_MARKS = set("*?[")


def discover(names: Sequence[str], *, lines: bool = False, split: str = "train") -> list[Source]:
    """Every source behind these names, each once, in the order of the names and then of the paths."""
    sources: dict[tuple[str, str], Source] = {}
    for name in names:
        with named_errors("read", name):
            found = _behind(name, lines, split)
        if not found:
            raise BadInputError(f"{name} holds nothing to read", hint=f"it may hold {_readable()} files")
        sources.update({(source.url, source.part): source for source in found})
    return list(sources.values())


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


def _behind(name: str, lines: bool, split: str) -> list[Source]:
    if url_scheme(name) == "hf":
        return tables.hub_sources(name.removeprefix("hf://"), split)
    if is_local(name):
        path = local_path(name).absolute()  # tasks may run in another folder, or on another machine
        if _is_there(path) and path.is_dir():
            if tables.is_saved_dataset(path):
                return tables.saved_sources(path, split)
            return _sources(str(path), list(open_store(path).list()), lines)
        if _is_there(path):
            return _sources(*_one_file(str(path)), lines, named=True)
        if _GLOB_MARKS & set(str(path)):
            matches = sorted(glob.glob(str(path), recursive=True))
            return [
                source
                for match in matches
                if not Path(match).is_dir()
                for source in _behind(match, lines, split)
            ]
        raise BadInputError(f"{name} does not exist", hint="check the path, and quote globs with **")
    return _remote(name, lines)


def _is_there(path: Path) -> bool:
    """Unlike Path.exists, this tells a missing file from one behind a closed folder."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _remote(name: str, lines: bool) -> list[Source]:
    if _GLOB_MARKS & set(name):
        fixed = name[: min(name.index(mark) for mark in _GLOB_MARKS if mark in name)].rpartition("/")[0]
        pattern = name.removeprefix(fixed).lstrip("/")
        entries = [entry for entry in open_store(fixed).list() if fnmatch(entry.path, pattern)]
        return _sources(fixed, entries, lines, named=True)
    if _kind(name):
        return _sources(*_one_file(name), lines, named=True)
    return _sources(name, list(open_store(name).list()), lines)


def _one_file(url: str) -> tuple[str, list[Entry]]:
    folder, path = split_url(url)
    return folder, [open_store(folder).stat(path)]


def _sources(base: str, entries: list[Entry], lines: bool, *, named: bool = False) -> list[Source]:
    sources = []
    for entry in sorted(entries, key=lambda entry: entry.path):
        url = join_url(base, entry.path)
        kind, compression = _kind(entry.path), _compression(entry.path)
        if not kind and named:
            raise BadInputError(
                f"{url}: cannot tell what kind of file this is", hint=f"use {_readable()} names"
            )
        if kind and not entry.path.rpartition("/")[2].startswith("."):
            units = _units(url, kind, compression, entry.bytes, lines)
            sources.append(
                Source(
                    url=url,
                    kind=kind,
                    bytes=entry.bytes,
                    units=units,
                    version=entry.version,
                    compression=compression,
                )
            )
    return sources


def _units(url: str, kind: str, compression: str, size: int, lines: bool) -> int:
    if kind in ("parquet", "arrow") and not compression:
        return tables.units(url, kind)
    if not compression and (kind == "jsonl" or (kind == "text" and lines)):
        return max(1, size)
    return 1


def _kind(path: str) -> str:
    plain = path.removesuffix(".gz").removesuffix(".zst")
    return _KINDS.get(Path(plain).suffix.lower(), "")


def _compression(path: str) -> str:
    return _COMPRESSIONS.get(Path(path).suffix.lower(), "")


def _readable() -> str:
    return ", ".join(_KINDS) + " (also .gz, .zst)"


def check_reading(sources: Sequence[Source], *, lines: bool) -> None:
    """`--lines` is about text files: refuse it where it would do nothing."""
    if lines and not any(source.kind == "text" for source in sources):
        raise UsageError("--lines was given, but no source is a .txt file", hint="leave --lines out")
