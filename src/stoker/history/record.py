"""Recording: how figures get into the store. One call for benchmarks and trials, one for watched runs."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stoker.history.figures import Entry, Figure, Origin
from stoker.history.origin import read_origin
from stoker.history.store import read_store, store_for, write_entries
from stoker.redact import redact_args, redact_text

_SIBLINGS = 50  # run folders looked at for one that nobody recorded


def record(
    kind: str,
    title: str,
    figures: Sequence[Figure],
    *,
    command: Sequence[str] = (),
    facts: Mapping[str, Any] | None = None,
    store: Path | None = None,
    origin: Origin | None = None,
) -> Entry | None:
    """Put what was just measured into the store; None where $STOKER_HISTORY is off. `title` names what is
    compared over time: the same title, and command if given, for the same measurement."""
    place = store or store_for()
    if place is None or not figures:
        return None
    now = time.time()
    entry = Entry(
        id=entry_id(kind, title, now, time.monotonic_ns()),
        kind=kind,
        title=redact_text(title),
        at=now,
        told=now,
        origin=origin or read_origin(),
        figures=tuple(figures),
        command=tuple(redact_args(command)),
        facts=dict(facts or {}),
    )
    write_entries(place, [entry])
    return entry


def record_run(folder: Path, *, title: str = "", store: Path | None = None) -> Path | None:
    """Record a watched run, and runs beside it whose watcher was killed before it could; the store's path.
    None where that is switched off, or other watchers of the same run still go on: the last of them tells."""
    from stoker.history.runs import read_run

    place = store or store_for(folder)
    if place is None:
        return None
    entry = read_run(folder, title=title, code=Path.cwd())
    if entry is None:
        return None
    write_entries(place, [entry, *_forgotten(folder, place, beside=entry)])
    return place


def entry_id(*parts: object) -> str:
    """The same for the same parts: what is imported twice is one entry."""
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _forgotten(folder: Path, store: Path, *, beside: Entry) -> list[Entry]:
    """A node that was lost, or a watcher killed with its job, leaves a run folder and no record."""
    from stoker.history.runs import read_run, run_id

    found: list[Entry] = []
    with suppress(Exception):  # somebody else's folders: what they hold must not cost this run its record
        siblings = [one for one in folder.absolute().parent.iterdir() if any(one.glob("node-*.json"))]
        newest = sorted(siblings, key=lambda one: one.stat().st_mtime, reverse=True)[:_SIBLINGS]
        known = {one.id for one in read_store(store).entries} | {beside.id}
        for one in newest:
            if run_id(one) not in known:
                with suppress(Exception):
                    entry = read_run(one)
                    found += [entry] if entry else []
    return found
