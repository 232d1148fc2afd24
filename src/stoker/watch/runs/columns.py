"""Columnar reads of a run folder, also while it is being written: rings, rows, events."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.formats.small_json import parse_json
from stoker.recording import KINDS, Event, Floats, Samples, Seen, Spans, Stacks, Steps
from stoker.spans import FIRST, HEAD, HEAD_BYTES, MAGIC

_RECORD = np.dtype(
    [
        ("start", "<f8"), ("end", "<f8"), ("step", "<i8"), ("bytes", "<i8"),
        ("what", "<u2"), ("thread", "<u2"), ("number", "<u4"),
    ]
)  # fmt: skip

ROWS = 1 << 16  # of one file of samples: 18 hours at one a second
_BLOCK = 256  # rows kept of each read

# What the stages call their spans, by the kind of time it is; a name in neither list is no time of the loop.
_KIND_OF = {**{kind: kind for kind in KINDS}, "load.wait": "data", "load.copy": "h2d"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The records of one ring in the order they were written; `lost` is how many older ones it dropped."""

    names: tuple[str, ...]
    records: NDArray[Any]
    lost: int


def read_ring(path: Path) -> Ring:
    """A ring as it stands; an empty one of a file that is not there or not yet begun."""
    try:
        with path.open("rb") as file:
            head = file.read(FIRST)
        if len(head) < FIRST or not head.startswith(MAGIC):
            raise ValueError("no ring")
        _, size, capacity, _, _, named = HEAD.unpack_from(head)
        whole = (path.stat().st_size - FIRST) // _RECORD.itemsize  # fewer where a copy of it was cut
        if size != _RECORD.itemsize or not whole:
            raise ValueError("nothing to read here")
        mapped = np.memmap(path, _RECORD, "r", offset=FIRST, shape=(min(capacity, whole),))
    except (OSError, ValueError):
        return Ring(names=(), records=np.empty(0, _RECORD), lost=0)
    names = tuple(head[HEAD_BYTES : HEAD_BYTES + named].decode(errors="replace").split("\n")[:-1])
    records = np.array(mapped[: _used(mapped)])
    records = records[(records["number"] > 0) & (records["what"] < len(names))]
    records = records[np.argsort(records["number"], kind="stable")]
    return Ring(names=names, records=records, lost=int(records["number"][0]) - 1 if len(records) else 0)


def _used(records: NDArray[Any]) -> int:
    """How many slots have been written: all, or those before the first empty one, found by halving. A live
    reader looks every second, and most of a young ring is empty."""
    low, high = 0, len(records)
    if records["number"][-1]:
        return high
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if records["number"][middle] else (low, middle)
    return low


def loop_thread(steps: Ring) -> int:
    """The thread that stepped the optimizer last; the first one where none did."""
    return int(steps.records["thread"][-1]) if len(steps.records) else 0


def as_spans(ring: Ring, *, thread: int, shift_s: float) -> Spans:
    """The spans of one thread whose kind is known, by start; nested ones of one kind are one."""
    kinds = np.array([KINDS.index(_KIND_OF[n]) if n in _KIND_OF else 255 for n in ring.names] or [255])
    kind = kinds[ring.records["what"]]
    mine = (ring.records["thread"] == thread) & (kind != 255)
    found, kind = ring.records[mine], kind[mine]
    order = np.lexsort((-found["end"], found["start"]))
    found, kind = found[order], kind[order]
    outer = _outermost(kind, found["end"])
    found, kind = found[outer], kind[outer]
    return Spans(
        kind=kind.astype(np.uint8),
        start=found["start"] + shift_s,
        end=found["end"] + shift_s,
        step=found["step"].astype(np.int64),
        bytes=found["bytes"].astype(np.int64),
    )


def _outermost(kinds: NDArray[Any], ends: Floats) -> NDArray[np.bool_]:
    """Of spans by start, the longest first where they begin together: those in no other one of their kind."""
    outer = np.ones(len(kinds), bool)
    for kind in np.unique(kinds):
        mine = kinds == kind
        outer[mine] = ends[mine] > np.maximum.accumulate(np.append(-np.inf, ends[mine]))[:-1]
    return outer


def as_steps(ring: Ring, spans: Ring, *, flops_per_token: float, shift_s: float) -> Steps:
    """Finished steps; the bytes of a step's record are its tokens. Where those are -1 they are what a loader
    of ours has handed out since the step before."""
    found = ring.records
    known = found["bytes"].astype(float)
    tokens = np.where(known >= 0, known, _handed_out(spans, found["end"]))
    return Steps(
        number=found["step"].astype(np.int64),
        start=found["start"] + shift_s,
        end=found["end"] + shift_s,
        tokens=tokens,
        flops=tokens * flops_per_token,
    )


def _handed_out(spans: Ring, ends: Floats) -> Floats:
    """Tokens of `stoker.feed` up to each of these ends, from the one before on; NaN until some are seen."""
    if "load.tokens" not in spans.names or not len(ends):
        return np.full(len(ends), np.nan)
    told = spans.records[spans.records["what"] == spans.names.index("load.tokens")]
    before = np.searchsorted(told["start"], ends, side="right")
    total = np.append(0, np.cumsum(told["bytes"]))[before]
    return np.where(total > 0, np.diff(total, prepend=0), np.nan)


def read_rows(path: Path, *, shift_s: float) -> Samples:
    """Every part of a file of samples; a torn last row is left out. Of more than ROWS every second is read,
    or every third, …, and the last: a live reader of a month of samples would take gigabytes."""
    tables = [table for part in (path, *_later_parts(path)) if (table := _Table.of(part)) is not None]
    every = max(1, -(-sum(table.count for table in tables) // ROWS))
    parts = [table.read(every) for table in tables]
    t = np.concatenate([part[0] for part in parts]) if parts else np.empty(0)
    names = dict.fromkeys(name for _, columns in parts for name in columns)
    columns = {name: _joined(parts, name) for name in names}
    known = {name: column for name, column in columns.items() if not np.isnan(column).all()}
    return Samples(t=t + shift_s, columns=known)


def read_events(path: Path, *, shift_s: float) -> tuple[Event, ...]:
    """Every whole line; one that a full disk cut short is left out."""
    try:
        lines = path.read_text("utf-8", "replace").split("\n")[:-1]
    except OSError:
        return ()
    found = []
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            one = parse_json(line)
            event = Event(t=one["t"] + shift_s, what=one["what"], text=one["text"], facts=one["facts"])
            found.append(event)
    return tuple(found)


def read_stacks(path: Path) -> Stacks:
    """What looks at a process's stack have seen; nothing of one that nobody looked at."""
    try:
        told = parse_json(path.read_text("utf-8", "replace"))
        rows = [
            Seen(inside=inside, what=what, line=line, seconds=float(seconds), looks=int(looks))
            for inside, what, line, seconds, looks in told["rows"]
        ]
        return Stacks(
            seconds=float(told["seconds"]),
            seen=tuple(rows),
            looks=int(told["held"]["looks"]),
            late=int(told["held"]["late"]),
            threads={str(line): int(count) for line, count in told["held"]["threads"].items()},
            gc_s=float(told["gc"]["seconds"]),
            gc_count=int(told["gc"]["count"]),
            gc_lines={str(line): float(s) for line, s in told["gc"].get("lines", {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Stacks()


def _later_parts(path: Path) -> list[Path]:
    parts = path.parent.glob(f"{path.stem}.*.rows")
    numbered = [part for part in parts if part.name.split(".")[-2].isdigit()]
    return sorted(numbered, key=lambda part: int(part.name.split(".")[-2]))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Table:
    """One part: where its rows begin, what they hold, how many there are."""

    path: Path
    names: list[str]
    begin: int
    count: int

    @classmethod
    def of(cls, path: Path) -> _Table | None:
        """None of a part that is not there, or whose first line is still being written."""
        try:
            with path.open("rb") as file:
                head = file.readline()
            names = parse_json(head)["columns"]
            count = (path.stat().st_size - len(head)) // _row(names).itemsize
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return cls(path=path, names=names, begin=len(head), count=count)

    def read(self, every: int) -> tuple[Floats, dict[str, Floats]]:
        row, kept = _row(self.names), []
        with self.path.open("rb") as file:
            file.seek(self.begin)
            for first in range(0, self.count, every * _BLOCK):
                some = np.fromfile(file, row, min(every * _BLOCK, self.count - first))
                kept.append(some[::every].copy())
            if self.count and (self.count - 1) % every:
                kept.append(some[-1:].copy())
        rows = np.concatenate(kept) if kept else np.empty(0, row)
        readings = rows["readings"].astype(np.float64)
        return rows["t"].copy(), {name: readings[:, index] for index, name in enumerate(self.names)}


def _row(names: list[str]) -> np.dtype[Any]:
    return np.dtype([("t", "<f8"), ("readings", "<f4", (len(names),))])


def _joined(parts: list[tuple[Floats, dict[str, Floats]]], name: str) -> Floats:
    return np.concatenate([columns.get(name, np.full(len(t), np.nan)) for t, columns in parts])
