"""Tasks that find copies: candidates band by band, pairs confirmed, clusters joined.

A row is a document's number among all spilled runs, in their order.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from stoker.manifest import FileRecord
from stoker.mixing import mixed
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.job import Job
from stoker.prepare.neardup import candidates, clusters, distinct_pairs, later_copies, similarity
from stoker.prepare.portions import over_cap
from stoker.prepare.shuffle import KEYS, Run, Table, duplicates
from stoker.prepare.sources.documents import sources_of
from stoker.storage import new_file

Numbers = npt.NDArray[np.uint64]


def match(job: Job, number: int) -> None:
    """One part of the values of one band; the band after the last compares whole contents."""
    band, part = divmod(number, job.plan.match_parts)
    low, high = (KEYS * (part + side) // job.plan.match_parts for side in (0, 1))
    values, places, rows = [np.zeros((0, 2), np.uint64)], [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]
    first = 0
    for run in job.all_runs():
        column = _band(job, run, band)
        inside = (column[:, 0] >= np.uint64(low)) & (column[:, 0] <= np.uint64(high - 1))
        values.append(column[inside])
        places.append(run.table()["location"][inside])
        rows.append(np.flatnonzero(inside).astype(np.uint64) + np.uint64(first))
        first += run.documents
    near = band < job.bands
    if near:
        found = candidates(np.concatenate(values)[:, 0], np.concatenate(rows))
    else:
        found = later_copies(np.concatenate(values), np.concatenate(places))
    complete(job, "match", number, found, near=near)


def _band(job: Job, run: Run, band: int) -> Numbers:
    """Two columns of values that copies share."""
    if band == job.bands:
        table = run.table()
        return np.stack([table["low"], table["high"]], axis=1)
    start = 8 * (job.bands * run.row + band * run.documents)
    values = np.fromfile(_beside(run, "bands"), "<u8", run.documents, offset=start)
    return np.stack([values, np.zeros_like(values)], axis=1)


def confirm(job: Job, number: int) -> None:
    """Of every so-manieth pair, those whose true similarity reaches the threshold."""
    assert job.plan.sketch
    pairs = _near_pairs(job)
    mine = mixed(pairs[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ pairs[:, 1]) % np.uint64(
        job.plan.stages["confirm"]
    )
    sets = _Shingles(job.all_runs())
    threshold = job.plan.sketch.threshold
    kept = [
        (one, other)
        for one, other in pairs[mine == np.uint64(number)].tolist()
        if similarity(sets.of(one), sets.of(other)) >= threshold
    ]
    complete(job, "confirm", number, np.array(kept, np.uint64).reshape(-1, 2))


def _near_pairs(job: Job) -> Numbers:
    lists = [np.zeros(0, np.uint64)]
    for number, result in enumerate(job.results("match")):
        if result["near"]:
            lists.append(read_list(job.drops("match", number)))
    return distinct_pairs(np.concatenate(lists).reshape(-1, 2))


def cluster(job: Job, number: int) -> None:
    """All confirmed pairs as clusters; of each the first document stays, or the longest."""
    lists = [read_list(job.drops("confirm", part)) for part in range(job.plan.stages["confirm"])]
    rows, names = clusters(np.concatenate(lists).reshape(-1, 2))
    runs = job.all_runs()
    places = _column(runs, rows, "location")
    lengths = (
        _Shingles(runs).counts(rows) if job.plan.curation.keep == "longest" else np.zeros(len(rows), np.int64)
    )
    order = np.lexsort((places, -lengths, names))
    stays = np.ones(len(rows), np.bool_)
    stays[1:] = names[order][1:] != names[order][:-1]
    complete(
        job, "cluster", number, np.sort(places[order][~stays]), clusters=int(stays.sum()) if len(rows) else 0
    )


def _column(runs: list[Run], rows: Numbers, name: str) -> Numbers:
    found, first = np.zeros(len(rows), np.uint64), 0
    for run in runs:
        inside = (rows >= np.uint64(first)) & (rows < np.uint64(first + run.documents))
        if inside.any():
            found[inside] = run.table()[name][(rows[inside] - np.uint64(first)).astype(np.int64)]
        first += run.documents
    return found


class _Shingles:
    """The n-grams of each row, mapped."""

    def __init__(self, runs: list[Run]) -> None:
        self._counts: list[npt.NDArray[np.int64]] = []
        self._maps: list[npt.NDArray[np.uint32]] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        for path in dict.fromkeys(_beside(run, "counts") for run in runs):
            counts = np.fromfile(path, "<u4").astype(np.int64)
            self._counts.append(counts)
            self._starts.append(np.concatenate([[0], np.cumsum(counts)]))
            data = path.with_suffix(".shingles")
            mapped = np.memmap(data, "<u4", "r") if data.stat().st_size else np.zeros(0, np.uint32)
            self._maps.append(np.asarray(mapped))  # slices of a memmap are slow objects
        self._firsts = np.concatenate([[0], np.cumsum([len(counts) for counts in self._counts])]).astype(
            np.int64
        )

    def of(self, row: int) -> npt.NDArray[np.uint32]:
        spill = int(np.searchsorted(self._firsts, row, "right")) - 1
        start, stop = self._starts[spill][row - self._firsts[spill] :][:2]
        return self._maps[spill][start:stop]

    def counts(self, rows: Numbers) -> npt.NDArray[np.int64]:
        joined = np.concatenate([np.zeros(0, np.int64), *self._counts])
        return joined[rows.astype(np.int64)]


def _beside(run: Run, suffix: str) -> Path:
    """A file of the spill that holds this run. Rows of a spill's runs follow one another in it."""
    return run.path.with_name(f"{run.path.name.partition('.')[0]}.{suffix}")


def read_list(path: Path) -> Numbers:
    if not path.stat().st_size:  # an empty file cannot be mapped
        return np.zeros(0, np.uint64)
    return np.memmap(path, "<u8", "r")


def complete(job: Job, stage: str, number: int, found: Numbers, **result: object) -> None:
    """Write a list of numbers down, and the task off."""
    path = job.drops(stage, number)
    data = found.astype("<u8").tobytes()
    with new_file(path) as file:
        file.write(data)
    digest = xxhash.xxh3_64_hexdigest(data)
    record = FileRecord(name=f"{path.parent.name}/{path.name}", bytes=len(data), xxh3=digest)
    job.ledger.complete(stage, number, result=dict(result), files=[record])


class Drops:
    """Which documents go: copies, neighbours of the same content or listed by a match task; with `caps` also
    what is over the cap of a source."""

    def __init__(self, job: Job, *, caps: bool = False) -> None:
        self._plan = job.plan
        self._limits: dict[str, int] = job.results("cap")[0]["limits"] if caps and job.results("cap") else {}
        self._neighbours = job.plan.dedup and job.plan.shuffle
        self._lists: dict[str, list[npt.NDArray[np.uint64]]] = {"duplicate": [], "near_duplicate": []}
        for number, result in enumerate(job.results("match")):
            if not result["near"]:
                self._lists["duplicate"].append(read_list(job.drops("match", number)))
        for number in range(len(job.results("cluster"))):
            self._lists["near_duplicate"].append(read_list(job.drops("cluster", number)))

    def without(self, table: Table, statistics: Statistics) -> Table:
        """The documents that stay; the others are counted under the first reason that names them."""
        gone = duplicates(table) if self._neighbours else np.zeros(len(table), np.bool_)
        counted = np.zeros_like(gone)
        for reason, lists in self._lists.items():
            for places in lists:
                gone |= _contains(places, table["location"])
            new = gone & ~counted
            if new.any():
                self._count(reason, table[new], statistics)
            counted |= gone
        over = over_cap(table, self._plan.sources, self._limits) & ~gone
        if over.any():
            self._count("over_cap", table[over], statistics, step="caps")
        kept: Table = table[~(gone | over)]
        return kept

    def _count(self, reason: str, gone: Table, statistics: Statistics, *, step: str = "") -> None:
        size = int(gone["text_bytes"].sum(dtype=np.int64))
        statistics.drop(reason, size, documents=len(gone))
        numbers, counts = np.unique(sources_of(gone["location"].astype(np.int64)), return_counts=True)
        for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
            source = self._plan.sources[number]
            statistics.funnel[step or f"{reason}s", reason, source.origin or source.url] += count


def _contains(ordered: npt.NDArray[np.uint64], values: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
    if not len(ordered):
        return np.zeros(len(values), np.bool_)
    at = np.searchsorted(ordered, values)
    return np.asarray(ordered[np.minimum(at, len(ordered) - 1)] == values)
