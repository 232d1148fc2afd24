"""Task functions: five kinds, each a function of (plan, number); the same call gives the same bytes.

map     read a split, curate, tokenise, spill in runs sorted by key
match   compare one band of all signatures, list pairs of candidates (copies.py)
confirm compare the n-grams of candidates
cluster join confirmed pairs, list what goes
write   gather a range of keys from every spill, drop copies, write shards
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from stoker.prepare.copies import Drops, cluster, confirm, match
from stoker.prepare.curate.pipeline import count_sources
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.encode import Encoder
from stoker.prepare.job import Job, open_job
from stoker.prepare.media.looks import cluster_looks, match_looks
from stoker.prepare.media.tasks import map_media, write_media
from stoker.prepare.plan import Plan
from stoker.prepare.shuffle import Cells, Gathered, Run, gather
from stoker.prepare.spill import SpillWriter, encoded_group
from stoker.prepare.writer import Shard, write_shard
from stoker.spans import span


def run_task(folder: Path, stage: str, number: int) -> None:
    """Run one task, unless its marker says that it is done."""
    job = open_job(folder)
    if job.ledger.result(stage, number) is None:
        with span(f"prepare.{stage}", step=number):
            (_MEDIA_TASKS if job.plan.media else _TASKS)[stage](job, number)


# --- map ------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _encoder(folder: Path) -> Encoder:
    job = open_job(folder)
    return Encoder(job.plan, job.tokenizer())


def _map(job: Job, number: int) -> None:
    plan, statistics = job.plan, Statistics()
    writer = SpillWriter(
        job.spill(number),
        ordering=plan.ordering,
        dtype=plan.dtype,
        marks=plan.marks,
        keep_texts=plan.layout.with_texts,
        sketch=plan.sketch,
    )
    with writer as spill:
        for block in _encoder(job.folder).blocks(number, statistics):
            spill.add(block)
        files = spill.finish()
    if spill.copies:
        statistics.drop("duplicate", spill.copied_bytes, documents=spill.copies)
    for source, count in spill.copied_of.items():
        origin = plan.sources[source].origin or plan.sources[source].url
        statistics.funnel["duplicates", "duplicate", origin] += count
    result = {"runs": spill.runs, "statistics": statistics.to_plain()}
    job.ledger.complete("map", number, result=result, files=files)


# --- write ----------------------------------------------------------------------------------------


def _write(job: Job, number: int) -> None:
    statistics = Statistics()
    shards = list((_straight_shards if job.plan.straight else _gathered_shards)(job, number, statistics))
    result = {"shards": [asdict(shard) for shard in shards], "statistics": statistics.to_plain()}
    job.ledger.complete("write", number, result=result, files=job.deliver(shards))


def _straight_shards(job: Job, number: int, statistics: Statistics) -> Iterator[Shard]:
    """Nothing has to meet: a split becomes a shard, or several where it proves too large for one."""
    blocks = _encoder(job.folder).blocks(number, statistics)
    layout = job.plan.layout
    groups = (
        _counted(
            encoded_group(block, layout.dtype, job.plan.marks, keep_texts=layout.with_texts),
            statistics,
            job.plan,
        )
        for block in blocks
    )
    limit = job.plan.shard_bytes * 5 // 4
    for part, some in enumerate(_rolled(groups, limit)):
        name = f"shard-{number:05d}-{part:03d}" if part else f"shard-{number:05d}"
        yield write_shard(job.target, name, some, layout=layout)


def _rolled(groups: Iterator[Gathered], limit: int) -> Iterator[Iterator[Gathered]]:
    """The groups again, as one iterator per `limit` bytes; each must be used up before the next."""
    return (_up_to(limit, first, groups) for first in groups)


def _up_to(limit: int, first: Gathered, groups: Iterator[Gathered]) -> Iterator[Gathered]:
    yield first
    size = first.bytes
    while size < limit and (group := next(groups, None)) is not None:
        yield group
        size += group.bytes


def _gathered_shards(job: Job, number: int, statistics: Statistics) -> Iterator[Shard]:
    """Shards of a range of coordinates, from every spill."""
    drops = Drops(job)
    for epoch in range(job.plan.epochs):
        runs = job.runs(epoch)
        cells = job.plan.cells(
            tokens=sum(run.tokens for run in runs), text_bytes=sum(run.text_bytes for run in runs)
        )
        counted = statistics if epoch == 0 else Statistics()
        for shard in _my_shards(number, tasks=job.plan.stages["write"], shards=cells.shards):
            groups = (
                _counted(
                    _without(drops, _gather(job.plan, runs, cells, shard, cell), counted), counted, job.plan
                )
                for cell in range(cells.per_shard)
            )
            name = f"shard-{epoch * cells.shards + shard:05d}"
            written = write_shard(job.target, name, groups, layout=job.plan.layout, epoch=epoch)
            if written.record.samples:
                yield written
            else:
                written.remove(job.target)


def _without(drops: Drops, group: Gathered, statistics: Statistics) -> Gathered:
    return replace(group, table=drops.without(group.table, statistics))


def _my_shards(number: int, *, tasks: int, shards: int) -> range:
    return range(-(-number * shards // tasks), -(-(number + 1) * shards // tasks))


def _gather(plan: Plan, runs: list[Run], cells: Cells, shard: int, cell: int) -> Gathered:
    low, high = cells.bounds(shard, cell)
    return gather(
        runs,
        low=low,
        high=high,
        shuffled=plan.shuffle,
        item_bytes=plan.dtype.itemsize,
        with_texts=plan.layout.with_texts,
    )


def _counted(group: Gathered, statistics: Statistics, plan: Plan) -> Gathered:
    table = group.table
    count_sources(
        statistics,
        [source.origin or source.url for source in plan.sources],
        table["location"],
        documents_out=1,
        bytes_out=table["text_bytes"],
        tokens_out=table["tokens"],
    )
    statistics.documents_out += len(table)
    statistics.bytes_out += int(table["text_bytes"].sum(dtype=np.int64))
    statistics.tokens_out += int(table["tokens"].sum(dtype=np.int64))
    powers, counts = np.unique(np.log2(np.maximum(table["tokens"], 1)).astype(int), return_counts=True)
    statistics.lengths.update(dict(zip(powers.tolist(), counts.tolist(), strict=True)))
    return group


_TASKS = {"map": _map, "match": match, "confirm": confirm, "cluster": cluster, "write": _write}
_MEDIA_TASKS = {"map": map_media, "match": match_looks, "cluster": cluster_looks, "write": write_media}
