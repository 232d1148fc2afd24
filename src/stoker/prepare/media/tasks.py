"""Media tasks: map (read, decode, tokenise captions, spill) and write (samples of a range of keys into tars).

As for texts, a task is (plan, stage, number) and gives the same bytes whoever runs it. A write task reads
the tables of all spills, and then one sample after another: memory is bounded by a block of a sample.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from stoker.formats import tar
from stoker.prepare.copies import Drops
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.job import Job, open_job
from stoker.prepare.media.sources.samples import Read, read_listed
from stoker.prepare.media.sources.tables import read_rows
from stoker.prepare.media.sources.tars import read_tar
from stoker.prepare.media.spill import Facts, MediaSpill, blocks_of, unpacked
from stoker.prepare.media.treat import Treatment
from stoker.prepare.plan import Plan
from stoker.prepare.shuffle import DOCUMENT, Cells, Run, Table, sorted_by_key, stretch
from stoker.prepare.sources.documents import Piece, locations
from stoker.prepare.sources.read import check_unchanged
from stoker.prepare.writer import Shard, finish_shard, hashed_file

_LARGEST = 5 / 4  # of the asked size: a shard that would be larger is cut
_OPEN = 256  # payloads held open: one per map task, of which there may be thousands
_AHEAD = 32  # samples that the kernel is asked for before they are read


# --- map ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _treatment(folder: Path) -> Treatment:
    job = open_job(folder)
    return Treatment(job.plan, job.tokenizer() if job.plan.tokenizer else None)


def map_media(job: Job, number: int) -> None:
    """Read a split, treat its samples, spill them."""
    plan, statistics = job.plan, Statistics()
    treatment = _treatment(job.folder)
    with MediaSpill(job.spill(number), ordering=plan.ordering) as spill:
        for piece in plan.splits[number]:
            for one in treatment.treated(piece.source, _samples(job, piece), statistics):
                location = int(locations(piece.source, np.array([one.sample.place]))[0])
                spill.add(
                    one.sample.members,
                    location=location,
                    facts=one.facts,
                    tokens=one.tokens,
                    thumb=one.thumb,
                )
        files, run = spill.finish()
    runs = [run] if run["documents"] else []
    job.ledger.complete(
        "map", number, result={"runs": {"": runs}, "statistics": statistics.to_plain()}, files=files
    )


def _samples(job: Job, piece: Piece) -> Iterator[Read]:
    assert job.plan.media
    source = job.plan.sources[piece.source]
    if source.kind == "listing":
        classes = {name: number for number, name in enumerate(job.plan.media.classes)}
        yield from read_listed(source, piece, job.listing(piece.source), classes)
        return
    yield from read_tar(source, piece) if source.kind == "webdataset" else read_rows(source, piece)
    if source.kind not in ("saved", "hub"):
        check_unchanged(source)


# --- write ----------------------------------------------------------------------------------------


def write_media(job: Job, number: int) -> None:
    """Shards of a range of keys, from every spill."""
    statistics = Statistics()
    shards = list(_shards(job, number, statistics))
    result = {"shards": [asdict(shard) for shard in shards], "statistics": statistics.to_plain()}
    job.ledger.complete("write", number, result=result, files=job.deliver(shards))


def _shards(job: Job, number: int, statistics: Statistics) -> Iterator[Shard]:
    plan, drops = job.plan, Drops(job)
    for epoch in range(plan.epochs):
        runs = job.runs(epoch)
        cells = plan.cells(tokens=0, text_bytes=sum(run.text_bytes for run in runs))
        counted = statistics if epoch == 0 else Statistics()
        tasks = plan.stages["write"]
        for shard in range(-(-number * cells.shards // tasks), -(-(number + 1) * cells.shards // tasks)):
            name = f"shard-{epoch * cells.shards + shard:05d}"
            rows = drops.without(_rows(plan, runs, cells, shard), counted)
            for part, some in enumerate(_cut(rows["text_bytes"], plan.shard_bytes)):
                named = f"{name}-{part:03d}" if part else name
                yield _write_shard(job, named, runs, rows[some], counted, epoch)


def _rows(plan: Plan, runs: list[Run], cells: Cells, shard: int) -> Table:
    """The samples of a shard in their order, each with the number of its run."""
    low, high = cells.bounds(shard, 0)[0], cells.bounds(shard, cells.per_shard - 1)[1]
    parts = [stretch(run, low, high, shuffled=plan.shuffle, by="text_start") for run in runs]
    rows = np.zeros(sum(map(len, parts)), _ROW)
    for name in DOCUMENT.names or ():
        rows[name] = np.concatenate([np.zeros(0, DOCUMENT[name]), *(part[name] for part in parts)])
    rows["run"] = np.repeat(np.arange(len(runs)), [len(part) for part in parts])
    return rows[sorted_by_key(rows)] if plan.shuffle else rows


_ROW = np.dtype([*DOCUMENT.descr, ("run", "<u4")])


def _cut(sizes: npt.NDArray[np.uint32], limit: int) -> list[slice]:
    """Rows as shards of about the asked bytes: one, unless that would be a quarter too large."""
    ends = np.cumsum(sizes, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    parts = 1 if total <= limit * _LARGEST else -(-total // limit)
    bounds = [
        0,
        *np.searchsorted(ends, [total * part // parts for part in range(1, parts)]).tolist(),
        len(ends),
    ]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start]


def _write_shard(
    job: Job, name: str, runs: list[Run], rows: Table, statistics: Statistics, epoch: int
) -> Shard:
    tokens, sources = 0, job.plan.sources
    with (
        hashed_file(job.target / f"{name}.tar", zstd=job.plan.zstd) as data,
        _Payloads(job, runs) as payloads,
    ):
        archive = tar.TarWriter(data)
        for number, row in enumerate(rows):
            payloads.want(rows[number + 1 : number + 1 + _AHEAD] if number % _AHEAD == 0 else rows[:0])
            file = payloads.of(int(row["run"]))
            packed = unpacked(file, int(row["text_start"]))
            members = ((suffix, size, blocks_of(file, start, size)) for suffix, start, size in packed.members)
            archive.stream(f"{name.removeprefix('shard-')}{number:08d}", members)
            size = sum(size for _, _, size in packed.members)
            origin = sources[packed.facts.source].origin or sources[packed.facts.source].url
            _count(statistics, job.plan, packed.facts, origin, size=size, tokens=int(row["tokens"]))
            tokens += int(row["tokens"])
        index = archive.close()
    side = (".index.npz", tar.index_bytes(index))
    return finish_shard(job.target, name, data, side, len(rows), tokens, epoch)


class _Payloads:
    """The payload files of runs, opened when first read."""

    def __init__(self, job: Job, runs: list[Run]) -> None:
        self._paths = [run.path.with_name(f"{run.path.name.partition('.')[0]}.payload") for run in runs]
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()

    def of(self, run: int) -> BinaryIO:
        if run not in self._open:
            if len(self._open) >= _OPEN:
                self._open.popitem(last=False)[1].close()
            self._open[run] = self._paths[run].open("rb", buffering=1 << 16)
        self._open.move_to_end(run)
        return self._open[run]

    def want(self, rows: Table) -> None:
        """Ask the kernel for samples that are read next: they lie here and there."""
        for row in rows:
            start, size = int(row["text_start"]), int(row["text_bytes"])
            os.posix_fadvise(self.of(int(row["run"])).fileno(), start, size, os.POSIX_FADV_WILLNEED)

    def __enter__(self) -> _Payloads:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()


def _count(statistics: Statistics, plan: Plan, facts: Facts, origin: str, *, size: int, tokens: int) -> None:
    statistics.documents_out += 1
    statistics.bytes_out += size
    statistics.tokens_out += tokens
    for name, value in (("documents_out", 1), ("bytes_out", size), ("tokens_out", tokens)):
        statistics.sources[name, origin] += value
    statistics.media.update(("formats", one) for one in facts.formats)
    if facts.width:
        side = 1 << (max(facts.width, facts.height).bit_length() - 1)
        statistics.media["longest_side", f"{side}-{2 * side - 1}"] += 1
    if facts.label >= 0:
        classes = plan.media.classes if plan.media else ()
        statistics.media["classes", class_name(classes, facts.label)] += 1


def class_name(classes: tuple[str, ...], label: int) -> str:
    """What statistics call a class: its name, or its number where nobody said one."""
    return classes[label] if label < len(classes) else str(label)
