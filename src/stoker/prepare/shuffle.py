"""External shuffle: two sequential passes over the tokens, memory bounded by one cell.

Every document gets a 64-bit key; the order of the dataset is the order of the keys. Pass one (a map
task) writes its documents in runs sorted by key. Pass two (a write task) takes a range of keys, reads
the matching stretch of every run, and merges them. The key is a hash of the seed, the epoch and the
document's content, so the permutation depends on nothing else: not on how many tasks, workers or
machines there were. Copies of a document share a key and meet, which is where they are dropped. With
duplicates kept, the key hashes the document's location instead.

With the shuffle off nothing is sorted: the coordinate of a document is its position in the stream of
all tokens, and pass two copies stretches of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.mixing import mixed

# What is known of each spilled document. `start` and `text_start` point into the run's files.
DOCUMENT = np.dtype(
    [
        ("key", "<u8"),
        ("high", "<u8"),
        ("low", "<u8"),
        ("location", "<u8"),
        ("start", "<i8"),
        ("text_start", "<i8"),
        ("tokens", "<u4"),
        ("text_bytes", "<u4"),
    ]
)
Table = npt.NDArray[Any]  # rows of DOCUMENT

KEYS = 1 << 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One sorted stretch of a spill file. `first` is the position of its first token among all."""

    path: Path
    row: int
    documents: int
    tokens: int
    text_bytes: int
    first: int

    def table(self) -> Table:
        table: Table = np.memmap(
            self.path.with_suffix(".docs"), DOCUMENT, "r", self.row * DOCUMENT.itemsize, (self.documents,)
        )
        return table


@dataclass(frozen=True, kw_only=True, slots=True)
class Cells:
    """The universe of coordinates cut into equal cells: shards, and cells of a shard that fit memory."""

    universe: int
    shards: int
    per_shard: int

    def bounds(self, shard: int, cell: int) -> tuple[int, int]:
        number, count = shard * self.per_shard + cell, self.shards * self.per_shard
        return self.universe * number // count, self.universe * (number + 1) // count


@dataclass(frozen=True, kw_only=True, slots=True)
class Gathered:
    """Documents of one cell, in order, over buffers that hold their tokens and texts."""

    table: Table
    tokens: memoryview
    texts: memoryview

    @property
    def bytes(self) -> int:
        return len(self.tokens) + len(self.texts)

    def is_in_order(self, item_bytes: int) -> bool:
        """Whether the buffer holds exactly these documents, one after another."""
        ends = np.cumsum(self.table["tokens"], dtype=np.int64) * item_bytes
        starts = np.concatenate([np.zeros(1, np.int64), ends])
        return bool(starts[-1] == len(self.tokens) and np.array_equal(self.table["start"], starts[:-1]))


def content_keys(table: Table, *, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return mixed(np.bitwise_xor(table["low"], salt(seed, epoch)))


def location_keys(table: Table, *, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    return mixed(mixed(table["location"]) ^ salt(seed, epoch))


def salt(seed: int, epoch: int) -> np.uint64:
    number = np.array([(seed * 1_000_003 + epoch) % KEYS], dtype=np.uint64)
    salted: np.uint64 = mixed(number)[0]
    return salted


def sorted_by_key(table: Table) -> npt.NDArray[np.intp]:
    """Key first; content and then location settle what shares a key."""
    return np.lexsort((table["location"], table["low"], table["high"], table["key"]))


def duplicates(table: Table) -> npt.NDArray[np.bool_]:
    """Which rows of a sorted table repeat the content of the row before. A document that is taken several
    times has a key for each."""
    repeated = np.zeros(len(table), np.bool_)
    repeated[1:] = np.logical_and.reduce(
        [table[name][1:] == table[name][:-1] for name in ("high", "low", "key")]
    )
    return repeated


def gather(
    runs: Sequence[Run], *, low: int, high: int, shuffled: bool, item_bytes: int, with_texts: bool
) -> Gathered:
    """Read the documents whose coordinate lies in [low, high), and sort them if they are shuffled."""
    stretches = [stretch(run, low, high, shuffled=shuffled) for run in runs]
    tokens, starts = _read_column(runs, stretches, ".tokens", "start", "tokens", item_bytes)
    texts, text_starts = memoryview(b""), starts
    if with_texts:
        texts, text_starts = _read_column(runs, stretches, ".text", "text_start", "text_bytes", 1)
    table = np.concatenate(stretches) if stretches else np.empty(0, DOCUMENT)
    table["start"], table["text_start"] = starts, text_starts
    if shuffled:
        table = table[sorted_by_key(table)]
    return Gathered(table=table, tokens=tokens, texts=texts)


def rows_between(runs: Sequence[Run], *, low: int, high: int, shuffled: bool) -> Table:
    """As `gather`, without the tokens and texts."""
    table = np.concatenate(
        [np.empty(0, DOCUMENT), *(stretch(run, low, high, shuffled=shuffled) for run in runs)]
    )
    return table[sorted_by_key(table)] if shuffled else table


def slices(buffer: memoryview, starts: npt.NDArray[Any], sizes: npt.NDArray[Any]) -> list[memoryview]:
    """One view per document."""
    ends = starts + sizes
    return [buffer[a:b] for a, b in zip(starts.tolist(), ends.tolist(), strict=True)]


def stretch(run: Run, low: int, high: int, *, shuffled: bool, by: str = "start") -> Table:
    """The rows of a run whose coordinate lies in [low, high): the key, or the place in the column `by`."""
    table = run.table()
    if shuffled:
        last = np.uint64(high - 1)  # 2^64 itself does not fit the key's type
        first, stop = (
            np.searchsorted(table["key"], np.uint64(low)),
            np.searchsorted(table["key"], last, "right"),
        )
    else:
        base = int(table[by][0]) if len(table) else 0
        first, stop = np.searchsorted(table[by] - base + run.first, (low, high))
    return np.array(table[first:stop])


def _read_column(
    runs: Sequence[Run], stretches: Sequence[Table], suffix: str, start: str, size: str, item_bytes: int
) -> tuple[memoryview, npt.NDArray[np.int64]]:
    """The stretches' bytes, back to back, and where each document starts in them."""
    totals = [int(stretch[size].sum(dtype=np.int64)) * item_bytes for stretch in stretches]
    buffer = memoryview(bytearray(sum(totals)))
    starts, at = [], 0
    for run, stretch, total in zip(runs, stretches, totals, strict=True):
        if total:
            first = int(stretch[start][0]) * item_bytes
            _read_exactly(run.path.with_suffix(suffix), first, buffer[at : at + total])
        ends = np.cumsum(stretch[size], dtype=np.int64) * item_bytes
        starts.append(at + ends - stretch[size].astype(np.int64) * item_bytes)
        at += total
    return buffer, np.concatenate(starts) if starts else np.empty(0, np.int64)


def _read_exactly(path: Path, start: int, target: memoryview) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while target:
            count = file.readinto(target)
            if not count:
                raise EOFError(f"{path} ends early: it was cut after its task finished")
            target = target[count:]
