"""Task functions: eight kinds, each a function of (plan, number); the same call gives the same bytes.

lines   hash the lines of a split, and
common  list those of several documents, where a step asks for them (repeats.py)
map     read a split, curate, tokenise, spill in runs sorted by key
match   compare one band of all signatures, list pairs of candidates (copies.py)
confirm compare the n-grams of candidates
cluster join confirmed pairs, list what goes
cap     find how much of each capped source is taken
write   gather a range of keys from every spill, drop copies, write shards
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from stoker.prepare.copies import Drops, cluster, confirm, match
from stoker.prepare.curate.pipeline import count_drops, count_sources
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.encode import Encoder
from stoker.prepare.job import Job, again, open_job
from stoker.prepare.media.looks import cluster_looks, match_looks
from stoker.prepare.media.tasks import map_media, write_media
from stoker.prepare.plan import Part, Plan
from stoker.prepare.portions import Tally, held_out, times
from stoker.prepare.repeats import RepeatedLines, common, lines
from stoker.prepare.shuffle import Cells, Gathered, Run, gather, rows_between
from stoker.prepare.sources.documents import Documents
from stoker.prepare.spill import RUN_BYTES, SpillWriter, encoded_group
from stoker.prepare.tokens import Encoded
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
    repeated = RepeatedLines(job) if job.plan.curation.lines_at >= 0 else None
    return Encoder(job.plan, job.tokenizer(), repeated)


def _map(job: Job, number: int) -> None:
    plan, statistics = job.plan, Statistics()
    with ExitStack() as opened:
        spills = {side: opened.enter_context(writer) for side, writer in _spills(job, number).items()}
        for block in _encoder(job.folder).blocks(number, statistics):
            for side, some in _sides(plan, block, statistics):
                spills[side].add(some)
        files = [file for spill in spills.values() for file in spill.finish()]
    held = {name for name, _ in plan.holdout}  # whose documents are counted as such, copies too
    for side, spill in spills.items():
        if spill.copies and side not in held:
            statistics.drop("duplicate", spill.copied_bytes, documents=spill.copies)
            for source, count in spill.copied_of.items():
                origin = plan.sources[source].origin or plan.sources[source].url
                statistics.funnel["duplicates", "duplicate", origin] += count
    runs = {side: spill.runs for side, spill in spills.items()}
    job.ledger.complete(
        "map", number, result={"runs": runs, "statistics": statistics.to_plain()}, files=files
    )


def _spills(job: Job, number: int) -> dict[str, SpillWriter]:
    """A spill for what is trained on, for each part held out, and for each time documents are taken again."""
    plan = job.plan
    more = range(1, plan.most_times)
    ordering = {
        "": plan.ordering,
        **{name: replace(plan.ordering, epochs=1) for name, _ in plan.holdout},
        **{again(time): replace(plan.ordering, again=time) for time in more},
    }
    return {
        side: SpillWriter(
            job.spill(number, side),
            ordering=how,
            dtype=plan.layout.spilled,
            marks=plan.marks,
            keep_texts=plan.layout.with_texts,
            sketch=None if side.startswith("+") else plan.sketch,
            run_bytes=RUN_BYTES // len(ordering),
        )
        for side, how in ordering.items()
    }


def _sides(plan: Plan, block: Encoded, statistics: Statistics) -> Iterator[tuple[str, Encoded]]:
    """The documents of a block by where they go; those taken several times go to several places."""
    if not plan.holdout and plan.most_times == 1:
        yield "", block
        return
    side = held_out(block.texts, plan.holdout) if plan.holdout else np.zeros(len(block.texts), np.int64)
    for number, (name, _) in enumerate(plan.holdout, start=1):
        rows = np.flatnonzero(side == number)
        documents = Documents(texts=block.texts, places=block.locations)
        count_drops(statistics, plan.sources, ("holdout", f"held_out_{name}"), documents, rows)
        if len(rows):
            yield name, block.take(rows)
    often = times(block.texts, block.locations, plan.sources, by_content=plan.dedup)
    for time in range(plan.most_times):
        rows = np.flatnonzero((side == 0) & (often > time))
        if time:
            statistics.found["weights", "taken_again"] += len(rows)
        if len(rows):
            yield again(time) if time else "", block.take(rows)


# --- cap ------------------------------------------------------------------------------------------


def _cap(job: Job, number: int) -> None:
    """Up to which lot the documents of each capped source are taken, of what is left without copies."""
    drops, tally, runs = Drops(job), Tally(job.plan.sources), job.trained_runs(0)
    cells = _cells(job.plan, runs)
    for cell in range(cells.shards * cells.per_shard):
        low, high = cells.bounds(*divmod(cell, cells.per_shard))
        table = rows_between(runs, low=low, high=high, shuffled=job.plan.shuffle)
        tally.add(drops.without(table, Statistics()))
    job.ledger.complete("cap", number, result={"limits": tally.limits()}, files=[])


# --- write ----------------------------------------------------------------------------------------


def _write(job: Job, number: int) -> None:
    statistics = Statistics()
    part, number_of_part, tasks = job.plan.part_of_task(number)
    if job.plan.straight:
        shards = list(_straight_shards(job, number, statistics))
    else:
        shards = list(_gathered_shards(job, part, _my_turn(number_of_part, tasks), statistics))
    result = {"shards": [asdict(shard) for shard in shards], "statistics": statistics.to_plain()}
    job.ledger.complete("write", number, result=result, files=job.deliver(shards, part.folder))


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


def _gathered_shards(
    job: Job, part: Part, mine: Callable[[int], range], statistics: Statistics
) -> Iterator[Shard]:
    """Shards of a range of coordinates, from every spill."""
    drops, folder = Drops(job, caps=not part.side), job.target / part.folder
    layout = replace(job.plan.layout, is_mask=part.is_mask)
    for epoch in range(1 if part.side else job.plan.epochs):
        runs = job.runs(epoch, part.side) if part.side else job.trained_runs(epoch)
        cells = _cells(job.plan, runs)
        counted = statistics if epoch == 0 else Statistics()
        for shard in mine(cells.shards):
            groups = (
                _counted(
                    _without(drops, _gather(job.plan, runs, cells, shard, cell), counted), counted, job.plan
                )
                for cell in range(cells.per_shard)
            )
            name = f"shard-{epoch * cells.shards + shard:05d}"
            written = write_shard(folder, name, groups, layout=layout, epoch=epoch)
            if written.record.samples:
                yield written
            else:
                written.remove(folder)


def _without(drops: Drops, group: Gathered, statistics: Statistics) -> Gathered:
    return replace(group, table=drops.without(group.table, statistics))


def _cells(plan: Plan, runs: list[Run]) -> Cells:
    return plan.cells(tokens=sum(run.tokens for run in runs), text_bytes=sum(run.text_bytes for run in runs))


def _my_turn(number: int, tasks: int) -> Callable[[int], range]:
    """Which shards, of so many, are this task's."""
    return lambda shards: range(-(-number * shards // tasks), -(-(number + 1) * shards // tasks))


def _gather(plan: Plan, runs: list[Run], cells: Cells, shard: int, cell: int) -> Gathered:
    low, high = cells.bounds(shard, cell)
    return gather(
        runs,
        low=low,
        high=high,
        shuffled=plan.shuffle,
        item_bytes=plan.layout.spilled.itemsize,
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


_TASKS = {
    "lines": lines,
    "common": common,
    "map": _map,
    "match": match,
    "confirm": confirm,
    "cluster": cluster,
    "cap": _cap,
    "write": _write,
}
_MEDIA_TASKS = {"map": map_media, "match": match_looks, "cluster": cluster_looks, "write": write_media}
