"""Commit of a dataset: shards put in place, and the manifest that makes them one.

A dataset that stands is left alone; of one that has lost files, what is missing is made again.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from stoker import __version__
from stoker.errors import (
    BadInputError,
    BadManifestError,
    EngineMismatchError,
    StorageError,
    TaskError,
    UsageError,
)
from stoker.formats.sizes import counted
from stoker.manifest import NAME as MANIFEST_NAME
from stoker.manifest import FileRecord, Manifest, find_manifest, is_absent, write_manifest
from stoker.prepare.curate.statistics import Statistics
from stoker.prepare.job import TOKENIZER_NAME, Job
from stoker.prepare.media.looks import copies_told
from stoker.prepare.plan import Part, Plan
from stoker.prepare.writer import Shard
from stoker.storage import Store, is_local, join_url, local_path, named_errors, open_store, sync_folder

STATISTICS_NAME = "statistics.json"
CLASSES_NAME = "classes.json"  # the names of classes: a sample's `.cls` is a place in this list

_FAILURES_SHOWN = 3
_AGAIN = "the same command does what is missing, and only that"


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A finished dataset."""

    url: str
    manifest: Manifest
    statistics: Statistics
    stage_seconds: dict[str, float] = field(default_factory=dict)


def check_stage(job: Job, stage: str, count: int) -> None:
    """Every task of the stage must have a marker."""
    failed = job.ledger.missing(stage, count)
    if not failed:
        return
    failures = [(number, job.ledger.failure(stage, number)) for number in failed]
    told = [(number, failure) for number, failure in failures if failure]
    for _, failure in told:
        if isinstance(failure, EngineMismatchError):
            raise failure
    shown = [f"{stage} task {number}: {failure.message}" for number, failure in told[:_FAILURES_SHOWN]]
    hints = dict.fromkeys(failure.hint for _, failure in told[:_FAILURES_SHOWN] if failure.hint)
    raise TaskError(
        "\n".join(
            [f"{len(failed)} of {counted(count, f'{stage} task')} not done, {len(told)} failed", *shown]
        ),
        hint="; ".join([*hints, f"logs are in {job.folder / 'logs'}", _AGAIN]),
    )


def finish(job: Job) -> Prepared:
    """All tasks are done: check their shards, write statistics and manifest, clean up."""
    for stage, count in job.plan.stages.items():
        check_stage(job, stage, count)
    main, *others = job.plan.parts
    for part in others:  # first, since the main manifest says that all is done
        _finish_part(job, part, Statistics())
    statistics = Statistics(order=job.plan.steps)
    for result in job.results("map"):
        statistics.add(Statistics.from_plain(result["statistics"]))
    if job.plan.media:
        statistics.media.update(copies_told(job))
    manifest = _finish_part(job, main, statistics)
    clean_up(job)
    return Prepared(url=job.plan.out, manifest=manifest, statistics=statistics)


def _finish_part(job: Job, part: Part, statistics: Statistics) -> Manifest:
    """One dataset of the plan: its statistics, shards, and last its manifest."""
    results = [
        result for number, result in enumerate(job.results("write"))
        if job.plan.part_of_task(number)[0] == part
    ]  # fmt: skip
    for result in results:
        statistics.add(Statistics.from_plain(result["statistics"]))
    url = part_url(job.plan, part)
    store = open_store(url)
    if is_local(url):
        local_path(url).mkdir(parents=True, exist_ok=True)
    store.write(STATISTICS_NAME, (json.dumps(statistics.to_plain(), indent=1) + "\n").encode())
    if not statistics.documents_out:
        raise BadInputError(
            f"none of {counted(statistics.documents_in, 'document')} is left to write in {url}",
            hint="hold out a larger part, or none"
            if part.side
            else f"{join_url(url, STATISTICS_NAME)} counts why each was dropped",
        )
    manifest, blocks = _manifest(job, part, results)
    if is_local(url):
        _publish(job, part, manifest)
    _check_delivered(job, url, manifest)
    if job.plan.family == "huggingface" and not part.is_mask:
        store.write(TOKENIZER_NAME, job.tokenizer().definition.encode())
    if job.plan.media and job.plan.media.classes:
        store.write(CLASSES_NAME, (json.dumps(job.plan.media.classes, indent=1) + "\n").encode())
    return write_manifest(store, manifest, blocks=blocks)


def part_url(plan: Plan, part: Part) -> str:
    return join_url(plan.out, part.folder) if part.folder else plan.out


def clean_up(job: Job) -> None:
    for folder in (job.folder, job.target.parent):
        shutil.rmtree(folder, ignore_errors=True)


def _manifest(job: Job, part: Part, results: list[dict[str, Any]]) -> tuple[Manifest, Any]:
    plan = job.plan
    shards = sorted(  # within an epoch they are in order already, and a long number sorts badly by name
        (Shard.from_plain(shard) for result in results for shard in result["shards"]),
        key=lambda shard: shard.record.epoch,
    )
    manifest = Manifest(
        format=plan.format,
        shards=tuple(shard.record for shard in shards),
        dtype=replace(plan.layout, is_mask=part.is_mask).written.name if plan.tokenizer else "",
        compression="zstd" if plan.zstd else "",
        tokenizer=None if part.is_mask else plan.tokenizer,
        shuffled=plan.shuffle,
        seed=plan.seed,
        epochs=1 if part.side else plan.epochs,
        plan=plan.digest,
        made_by=f"stoker {__version__}",
    )
    return manifest, np.array([digest for shard in shards for digest in shard.blocks], np.uint64)


def _publish(job: Job, part: Part, manifest: Manifest) -> None:
    """Put the shards where they belong. They also stay where they were written, until the folder goes: a run
    that is killed here finds all its tasks done."""
    out = local_path(part_url(job.plan, part))
    for file in manifest.files():
        written, shown = job.target / part.folder / file.name, out / file.name
        if not written.exists():  # moved before a crash, where there are no links
            continue
        # Never away and there again: another run of this command may have finished the dataset meanwhile.
        aside = shown.with_name(f".{shown.name}.{secrets.token_hex(6)}.tmp")
        try:
            os.link(written, aside)
            aside.replace(shown)
        except OSError:
            with named_errors("write", shown):
                written.replace(shown)
        finally:
            aside.unlink(missing_ok=True)
    sync_folder(out)


def _check_delivered(job: Job, url: str, manifest: Manifest) -> None:
    """Every file must be where the manifest will say it is, in its full size."""
    store = open_store(url)
    for file in manifest.files():
        found = store.stat(file.name).bytes
        if found != file.bytes:
            raise TaskError(
                f"{join_url(url, file.name)} is {found:,} bytes, its task wrote {file.bytes:,}",
                hint=f"delete it and {job.folder}, and run the same command again",
            )


def already_there(plan: Plan) -> Prepared | None:
    """The finished dataset; None where there is none, or where files of it are missing."""
    for part in reversed(plan.parts):
        manifest = find_manifest(part_url(plan, part))
        store = open_store(part_url(plan, part))
        if manifest is None or not all(_is_delivered(store, file) for file in manifest.files()):
            return None
    assert manifest  # of the first part, which is looked at last
    return Prepared(url=plan.out, manifest=manifest, statistics=read_statistics(plan.out))


def read_statistics(url: str) -> Statistics:
    """What `prepare` counted when it made this dataset."""
    name = join_url(url, STATISTICS_NAME)
    try:
        with open_store(url).open(STATISTICS_NAME) as file:
            return Statistics.from_plain(json.loads(file.read()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise BadManifestError(
            f"{name} cannot be read: {error}",
            hint=f"restore it, or delete {join_url(url, MANIFEST_NAME)} too and run the same command again",
        ) from error


def _is_delivered(store: Store, file: FileRecord) -> bool:
    try:
        return store.stat(file.name).bytes == file.bytes
    except StorageError as error:
        if is_absent(error):
            return False
        raise


def check_out(plan: Plan) -> None:
    """A dataset is never overwritten: another plan needs another folder."""
    manifest = find_manifest(plan.out)
    if manifest and manifest.plan != plan.digest:
        raise UsageError(
            f"{plan.out} already holds a dataset made from other sources or options",
            hint=f"choose another --out, or delete {join_url(plan.out, MANIFEST_NAME)} and its shards first",
        )
