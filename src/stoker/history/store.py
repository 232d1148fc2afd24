"""The store: a folder of small SQLite files, each written whole by one writer and never changed.

    .stoker/history.db/          20261118T073015-1f0c2a9b44d1e0aa.db    one entry, or many that were compacted

A file appears under its name only when it is complete and synced, so no lock is ever taken: several writers,
NFS and SIGKILL are the same easy case. Readers open files as immutable. An entry that stands in several files
(it was imported again, a compaction died half way) counts once, as told last. A file that is damaged, or was
written by a newer stoker, is named and the rest is read.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from stoker.errors import StorageError, UsageError
from stoker.history.figures import Entry, Figure, Origin
from stoker.storage import named_errors, sync_folder

VARIABLE = "STOKER_HISTORY"
OFF = ("off", "none", "0")
PLACE = Path(".stoker") / "history.db"
VERSION = 1  # of the tables, in SQLite's user_version
LOOSE = 64  # files above which a reader compacts those that are old enough
_SETTLED_S = 3600.0  # an age at which a file is surely seen by every client of an NFS
_AGAIN = 5  # listings, where files vanish under a reader because somebody compacts

_TABLES = """
create table entries (
    id text primary key, kind text, title text, at real, told real, machine text, host text, gpus text,
    commit_id text, branch text, dirty integer, versions text, command text, run text, facts text, digest text
);
create table figures (entry text, name text, value real, unit text, better text, low real, high real);
"""
_IS_STORE = "select count(*) from sqlite_master where type = 'table' and name in ('entries', 'figures')"
_LATEST = 1e11  # seconds since 1970, in the year 5138: what a calendar can still write


@dataclass(frozen=True, kw_only=True, slots=True)
class Read:
    """What a store holds, oldest first; `damaged` names files, or entries in them, that could not be read."""

    entries: tuple[Entry, ...]
    damaged: tuple[str, ...] = ()


def store_for(run: Path | None = None, *, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Where a run is recorded: $STOKER_HISTORY, or beside its folder; None where that is switched off."""
    told = environ.get(VARIABLE, "")
    if told.lower() in OFF:
        return None
    if told:
        return Path(told)
    return (run.absolute().parent if run else Path.cwd() / "stoker-runs") / PLACE


def find_store(*, environ: Mapping[str, str] = os.environ) -> Path:
    """The store to read: $STOKER_HISTORY, else that of the runs here."""
    told = environ.get(VARIABLE, "")
    if told and told.lower() not in OFF:
        return Path(told)
    here = Path.cwd()
    return next(
        (base / PLACE for base in (here, here / "stoker-runs") if (base / PLACE).is_dir()),
        here / "stoker-runs" / PLACE,
    )


def write_entries(store: Path, entries: Sequence[Entry]) -> Path:
    """One new file with these entries; there, whole and synced, or not at all."""
    if store.exists() and not store.is_dir():
        raise UsageError(f"{store} is no folder", hint=f"a history is a folder: give another ${VARIABLE}")
    with named_errors("write", store):
        store.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            store.mkdir(mode=0o700)
    name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"
    scratch = store / f".{name}.tmp"
    try:
        with named_errors("write", store):
            _make(scratch, [_in_utf8(one) for one in entries])
            os.chmod(scratch, 0o600 | store.stat().st_mode & 0o044)  # who may read the folder may read it
            _sync(scratch)
            os.rename(scratch, store / f"{name}.db")
            sync_folder(store)
    except sqlite3.Error as error:
        raise StorageError(
            f"cannot write {store}: {error}", hint="free space there, and import again"
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink()
    return store / f"{name}.db"


def read_store(store: Path) -> Read:
    """Every entry that can be read, and the names of what cannot."""
    kept: dict[str, Entry] = {}
    seen: set[Path] = set()
    damaged: list[str] = []
    for _ in range(_AGAIN):
        new = [path for path in sorted(store.glob("*.db")) if path not in seen]
        gone = False
        for path in new:
            try:
                entries, wrong = _read(path)
            except FileNotFoundError:
                gone = True  # compacted meanwhile: its entries are in a file not listed yet
                continue
            seen.add(path)
            damaged += wrong
            for entry in entries:
                if entry.id not in kept or kept[entry.id].told <= entry.told:
                    kept[entry.id] = entry
        if not gone:
            break
    return Read(
        entries=tuple(sorted(kept.values(), key=lambda one: (one.at, one.id))), damaged=tuple(damaged)
    )


def compact(store: Path, *, settled_s: float = _SETTLED_S) -> int:
    """Bring old small files together in one; gives how many. The new one is there and read back before an
    old one goes, and whatever happens in between only leaves entries twice, which count once."""
    old = [path for path in sorted(store.glob("*.db")) if _age_s(path) >= settled_s]
    if len(old) < 2:
        return 0
    whole: dict[str, Entry] = {}
    sources = []
    for path in old:
        with suppress(FileNotFoundError):
            entries, wrong = _read(path)
            if not wrong:  # a damaged file stays as it is: somebody may mend it
                sources.append(path)
                whole |= {
                    one.id: one for one in entries if one.id not in whole or whole[one.id].told <= one.told
                }
    if len(sources) < 2:
        return 0
    made = write_entries(store, list(whole.values()))
    if {one.id: one for one in _read(made)[0]} != whole:
        raise StorageError(
            f"{made} does not read back as written", hint="check the disk; nothing was removed"
        )
    for path in sources:
        with suppress(OSError):
            path.unlink()
    return len(sources)


def write_single(path: Path, entries: Sequence[Entry]) -> None:
    """All entries as one plain SQLite file, for people's own queries."""
    with named_errors("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
        try:
            _make(scratch, entries)
            os.replace(scratch, path)
        finally:
            with suppress(OSError):
                scratch.unlink()


# --- one file -------------------------------------------------------------------------------------


def _make(path: Path, entries: Iterable[Entry]) -> None:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with closing(sqlite3.connect(path)) as base:
        base.execute("pragma journal_mode=off")  # nobody sees the file before it is whole
        base.execute("pragma locking_mode=exclusive")
        base.executescript(_TABLES)
        for entry in entries:
            row = _row(entry)
            base.execute(f"insert into entries values ({','.join('?' * len(row))})", row)
            base.executemany(
                "insert into figures values (?,?,?,?,?,?,?)",
                [(entry.id, f.name, f.value, f.unit, f.better, f.low, f.high) for f in entry.figures],
            )
        base.execute(f"pragma user_version={VERSION}")
        base.commit()


def _read(path: Path) -> tuple[list[Entry], list[str]]:
    """The entries of a file and what is wrong with it; raises FileNotFoundError where it has gone."""
    if not path.exists():
        raise FileNotFoundError(path)
    if not path.is_file():  # a reader of somebody's FIFO waits for ever
        return [], [f"{path} is no file"]
    try:
        # immutable: no lock is asked for, which an NFS may not have, nor a journal looked for
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as base:
            base.text_factory = lambda raw: raw.decode("utf-8", "replace")
            (version,) = base.execute("pragma user_version").fetchone()
            if version > VERSION:
                return [], [
                    f"{path}: written by a newer stoker (version {version}, this one reads {VERSION})"
                ]
            if base.execute(_IS_STORE).fetchone() != (2,):  # a view may have no end
                return [], [f"{path} is no history of stoker's"]
            rows = base.execute("select * from entries").fetchall()
            figures: dict[str, list[Figure]] = {}
            for name, *cells in base.execute("select * from figures order by rowid"):
                figures.setdefault(name, []).append(_figure(cells))
    except (sqlite3.Error, OSError, ValueError, TypeError, UsageError) as error:
        if not path.exists():
            raise FileNotFoundError(path) from error
        return [], [f"{path}: {error}"]
    return _whole(path, rows, figures)


def _whole(
    path: Path, rows: Sequence[Sequence[Any]], figures: Mapping[str, list[Figure]]
) -> tuple[list[Entry], list[str]]:
    entries, wrong = [], []
    for row in rows:
        try:
            entry = _entry(row, tuple(figures.get(row[0], ())))
            if row[-1] != _digest(entry):
                raise ValueError("its figures are not those that were written")
            entries.append(entry)
        except (ValueError, TypeError, IndexError, KeyError, RecursionError) as error:
            wrong.append(f"{path}, entry {str(row[0])[:40]}: {error}")
    return entries, wrong


def _in_utf8(entry: Entry) -> Entry:
    """Names of files need not be UTF-8, nor read as such where LANG is C; SQLite's text is."""
    title, run, *command = (
        one.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        for one in (entry.title, entry.run, *entry.command)
    )
    return replace(entry, title=title, run=run, command=tuple(command))


def _row(entry: Entry) -> tuple[Any, ...]:
    where = entry.origin
    return (
        entry.id, entry.kind, entry.title, entry.at, entry.told, where.machine, where.host,
        json.dumps(where.gpus), where.commit, where.branch, int(where.dirty),
        json.dumps(dict(where.versions)), json.dumps(entry.command),
        entry.run, json.dumps(dict(entry.facts)), _digest(entry),
    )  # fmt: skip


def _entry(row: Sequence[Any], figures: tuple[Figure, ...]) -> Entry:
    (
        id,
        kind,
        title,
        at,
        told,
        machine,
        host,
        gpus,
        commit,
        branch,
        dirty,
        versions,
        command,
        run,
        facts,
        _,
    ) = row
    command, gpus = tuple(json.loads(command)), tuple(json.loads(gpus))
    versions, facts = json.loads(versions), json.loads(facts)
    texts = (id, kind, title, machine, host, commit, branch, run, *command, *gpus)
    if not all(isinstance(one, str) for one in texts) or not isinstance(facts, dict):
        raise ValueError("a text of it is none")
    if not (0 <= at < _LATEST and 0 <= told < _LATEST):
        raise ValueError(f"it was made at {at}, told at {told}")
    origin = Origin(
        machine=machine,
        host=host,
        gpus=gpus,
        commit=commit,
        branch=branch,
        dirty=bool(dirty),
        versions=versions,
    )
    return Entry(
        id=id,
        kind=kind,
        title=title,
        at=float(at),
        told=float(told),
        origin=origin,
        figures=figures,
        command=command,
        run=run,
        facts=facts,
    )


def _figure(cells: Sequence[Any]) -> Figure:
    name, value, unit, better, low, high = cells
    if not (isinstance(name, str) and isinstance(unit, str)):
        raise ValueError("the name or unit of a figure is no text")
    return Figure(name=name, value=value, unit=unit, better=better, low=low, high=high)


def _digest(entry: Entry) -> str:
    """Of everything told: a disk that flips a bit of a figure must not make a regression."""
    return xxhash.xxh3_64_hexdigest(json.dumps(asdict(entry), sort_keys=True, default=str).encode())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return -1.0
