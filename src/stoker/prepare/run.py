"""The driver: plan, run the stages through a launcher, finish with the manifest.

Nothing here knows how a task is run, and no task knows who runs it. Everything lives in a work folder
named by the plan's digest: the same command finds what an earlier, killed one left and does the rest.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stoker import __version__
from stoker.errors import BadInputError, EngineMismatchError, StorageError, TaskError, UsageError
from stoker.launch.ledger import Ledger
from stoker.manifest import NAME as MANIFEST_NAME
from stoker.manifest import (
    FileRecord,
    Manifest,
    TokenizerRecord,
    find_manifest,
    is_absent,
    write_manifest,
)
from stoker.prepare import tokens
from stoker.prepare.curate import Statistics
from stoker.prepare.job import TOKENIZER_NAME, Job
from stoker.prepare.plan import Options, Plan, make_plan
from stoker.prepare.writer import Shard
from stoker.sources.discover import check_reading, discover
from stoker.sources.documents import Piece, Source
from stoker.sources.read import read_piece
from stoker.storage import (
    Store,
    is_local,
    join_url,
    local_path,
    named_errors,
    new_file,
    open_store,
    sync_folder,
)

STATISTICS_NAME = "statistics.json"

_FIRST_DOCUMENTS, _FIRST_CHARS = 64, 4096  # what an engine is tried on before it is chosen
_FAILURES_SHOWN = 3
_AGAIN = "the same command does what is missing, and only that"


class Launcher(Protocol):
    """Runs tasks somewhere. `run` is called once a stage, in order, with the tasks that are missing
    (maybe none). It returns when every one has ended, well or not, having called `on_done` from the
    driver's thread with each number that ended."""

    def run(
        self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]
    ) -> None: ...


class Queue(Protocol):
    """Takes over a whole run: `submit_all` returns at once with the job ids of each stage. `merge` is a
    Python module with its arguments, to run when every stage has ended."""

    def submit_all(
        self, ledger: Ledger, stages: Mapping[str, Sequence[int]], *, merge: Sequence[str]
    ) -> dict[str, list[str]]: ...


class Watcher(Protocol):
    """Shows progress; called from the driver's thread."""

    def planned(self, plan: Plan, folder: Path) -> None: ...
    def stage(self, name: str, *, total: int, done: int) -> None: ...
    def advance(self, name: str, number: int) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A finished dataset."""

    url: str
    manifest: Manifest
    statistics: Statistics
    stage_seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Submitted:
    """A dataset that jobs will make: their ids by stage, and the folder they work in."""

    url: str
    folder: Path
    jobs: dict[str, list[str]]


def prepare(options: Options, launcher: Launcher, *, watcher: Watcher, work: Path | None = None) -> Prepared:
    """Make the dataset, or what is missing of it."""
    try:
        return _prepare(options, launcher, watcher, work)
    except EngineMismatchError as error:
        if options.on_mismatch != "fallback":
            raise
        watcher.note(f"{error.message}; starting again with the reference engine")
        reference = tokens.load_tokenizer(options.tokenizer).reference
        exact = replace(options, engine=reference, on_mismatch="stop")
        return _prepare(exact, launcher, watcher, work)


def _prepare(options: Options, launcher: Launcher, watcher: Watcher, work: Path | None) -> Prepared:
    job = plan_job(options, watcher=watcher, work=work)
    if done := _already_there(job.plan):
        watcher.note(f"{job.plan.out} is already prepared")
        _clean_up(job)
        return done
    watcher.planned(job.plan, job.folder)
    seconds = {}
    try:
        for stage, count in job.plan.stages.items():
            started = time.monotonic()
            run_stage(job, stage, count, launcher, watcher)
            seconds[stage] = round(time.monotonic() - started, 3)
    except EngineMismatchError:
        _clean_up(job)  # whatever runs next is another plan
        raise
    return replace(finish(job), stage_seconds=seconds)


class Crew(Launcher, Protocol):
    """One of several launchers that share the tasks of a run: `run_ours` waits for no other."""

    def run_ours(
        self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]
    ) -> None: ...


def assist(options: Options, crew: Crew, *, watcher: Watcher, work: Path | None = None) -> None:
    """Do our part of a dataset that another process, which calls `prepare`, finishes."""
    job = plan_job(options, watcher=watcher, work=work)
    if _already_there(job.plan):
        return
    watcher.planned(job.plan, job.folder)
    *before, last = job.plan.stages.items()
    for stage, count in before:
        run_stage(job, stage, count, crew, watcher)
    stage, count = last
    missing = missing_tasks(job, stage, count)
    watcher.stage(stage, total=count, done=count - len(missing))
    # the work folder goes as soon as all is written: what of it is ours is all that may be looked at now
    failed: list[int] = []

    def note(number: int) -> None:
        watcher.advance(stage, number)
        if job.ledger.failure(stage, number):
            failed.append(number)

    crew.run_ours(job.ledger, stage, missing, note)
    if failed:
        check_stage(job, stage, count)


def submit(
    options: Options, queue: Queue, *, watcher: Watcher, work: Path | None = None
) -> Submitted | Prepared:
    """Hand what is missing of the dataset to a queue, whose last job finishes it; does not wait."""
    if options.on_mismatch == "fallback":
        raise UsageError(
            "--on-mismatch fallback starts a run again, which a detached one cannot",
            hint="leave --detach out, or name the reference engine: --engine huggingface (or tiktoken)",
        )
    job = plan_job(options, watcher=watcher, work=work)
    if done := _already_there(job.plan):
        watcher.note(f"{job.plan.out} is already prepared")
        _clean_up(job)
        return done
    watcher.planned(job.plan, job.folder)
    missing = {stage: missing_tasks(job, stage, count) for stage, count in job.plan.stages.items()}
    jobs = queue.submit_all(job.ledger, missing, merge=("stoker.cli", "prepare", "merge", str(job.folder)))
    return Submitted(url=job.plan.out, folder=job.folder, jobs=jobs)


def plan_job(options: Options, *, watcher: Watcher, work: Path | None = None) -> Job:
    """Look at the sources, choose the engine, and write the plan into its folder."""
    sources = discover(options.sources, lines=options.reading.lines, split=options.split)
    check_reading(sources, lines=options.reading.lines)
    tokenizer = tokens.load_tokenizer(options.tokenizer)
    first = _first_documents(sources, options)
    engine, refused = tokens.choose_engine(tokenizer, options.engine, first)
    for reason in refused:
        watcher.note(f"not used: {reason}")
    record = TokenizerRecord(
        name=options.tokenizer,
        digest=tokenizer.digest,
        vocabulary=tokenizer.vocabulary,
        eod=tokens.choose_eod(tokenizer, options.eod),
        bos=tokens.choose_eod(tokenizer, options.bos) if options.bos else None,
        engine=engine,
        engine_version=tokens.engine_version(engine),
    )
    plan = make_plan(options, sources, record, tokenizer.family)
    job = Job(plan=plan, folder=work_folder(plan, work))
    _check_out(plan)
    _write_once(job.folder / TOKENIZER_NAME, json.dumps(asdict(tokenizer)))
    _write_once(job.folder / "plan.json", plan.to_json())
    return job


def work_folder(plan: Plan, work: Path | None) -> Path:
    """Where the tasks of this plan keep what they make: in the output folder, unless that is remote."""
    if work is None:
        if not is_local(plan.out):
            raise UsageError(
                f"{plan.out} is remote, and tasks need a folder they all see",
                hint="name one with --work (about twice the size of the tokens is needed)",
            )
        work = local_path(plan.out)
    return work.resolve() / f".stoker-{plan.digest[:16]}"


def run_stage(job: Job, stage: str, count: int, launcher: Launcher, watcher: Watcher) -> None:
    """Run what is missing of one stage; raises with the first failures if any is left."""
    missing = missing_tasks(job, stage, count)
    watcher.stage(stage, total=count, done=count - len(missing))
    # Also where nothing is missing: what an earlier driver left running must end before the folder goes.
    launcher.run(job.ledger, stage, missing, lambda number: watcher.advance(stage, number))
    check_stage(job, stage, count)


def missing_tasks(job: Job, stage: str, count: int) -> list[int]:
    """The tasks without a marker, and those whose files an accident has damaged since."""
    missing = job.ledger.missing(stage, count)
    return missing + job.ledger.recheck(stage, sorted(set(range(count)) - set(missing)))


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
            [f"{len(failed)} of {count} {stage} tasks are not done, {len(told)} of them failed", *shown]
        ),
        hint="; ".join([*hints, f"logs are in {job.folder / 'logs'}", _AGAIN]),
    )


def finish(job: Job) -> Prepared:
    """All tasks are done: check their shards, write statistics and manifest, clean up."""
    for stage, count in job.plan.stages.items():
        check_stage(job, stage, count)
    results = job.results("write")
    statistics = Statistics()
    for result in (*job.results("map"), *results):
        statistics.add(Statistics.from_plain(result["statistics"]))
    store = open_store(job.plan.out)
    store.write(STATISTICS_NAME, (json.dumps(statistics.to_plain(), indent=1) + "\n").encode())
    if not statistics.documents_out:
        raise BadInputError(
            f"none of {statistics.documents_in:,} documents is left to write",
            hint=f"{join_url(job.plan.out, STATISTICS_NAME)} counts why each was dropped",
        )
    manifest, blocks = _manifest(job, results)
    if is_local(job.plan.out):
        _publish(job, manifest)
    _check_delivered(job, manifest)
    if job.plan.family == "huggingface":
        store.write(TOKENIZER_NAME, job.tokenizer().definition.encode())
    manifest = write_manifest(store, manifest, blocks=blocks)
    _clean_up(job)
    return Prepared(url=job.plan.out, manifest=manifest, statistics=statistics)


def _clean_up(job: Job) -> None:
    for folder in (job.folder, job.target.parent):
        shutil.rmtree(folder, ignore_errors=True)


def _manifest(job: Job, results: list[dict[str, Any]]) -> tuple[Manifest, Any]:
    plan = job.plan
    shards = sorted(
        (Shard.from_plain(shard) for result in results for shard in result["shards"]),
        key=lambda shard: shard.record.name,
    )
    manifest = Manifest(
        format=plan.format,
        shards=tuple(shard.record for shard in shards),
        dtype=plan.dtype.name,
        compression="zstd" if plan.zstd else "",
        tokenizer=plan.tokenizer,
        shuffled=plan.shuffle,
        seed=plan.seed,
        epochs=plan.epochs,
        plan=plan.digest,
        made_by=f"stoker {__version__}",
    )
    return manifest, np.array([digest for shard in shards for digest in shard.blocks], np.uint64)


def _publish(job: Job, manifest: Manifest) -> None:
    """Put the shards where they belong. They also stay where they were written, until the folder goes: a run
    that is killed here finds all its tasks done."""
    out = local_path(job.plan.out)
    for file in manifest.files():
        written, shown = job.target / file.name, out / file.name
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


def _check_delivered(job: Job, manifest: Manifest) -> None:
    """Every file must be where the manifest will say it is, in its full size."""
    store = open_store(job.plan.out)
    for file in manifest.files():
        found = store.stat(file.name).bytes
        if found != file.bytes:
            raise TaskError(
                f"{join_url(job.plan.out, file.name)} is {found:,} bytes, its task wrote {file.bytes:,}",
                hint=f"delete it and {job.folder}, and run the same command again",
            )


def _already_there(plan: Plan) -> Prepared | None:
    """The finished dataset; None where there is none, or where files of it are missing."""
    manifest = find_manifest(plan.out)
    store = open_store(plan.out)
    if manifest is None or not all(_is_delivered(store, file) for file in manifest.files()):
        return None
    with store.open(STATISTICS_NAME) as file:
        statistics = Statistics.from_plain(json.loads(file.read()))
    return Prepared(url=plan.out, manifest=manifest, statistics=statistics)


def _is_delivered(store: Store, file: FileRecord) -> bool:
    try:
        return store.stat(file.name).bytes == file.bytes
    except StorageError as error:
        if is_absent(error):
            return False
        raise


def _check_out(plan: Plan) -> None:
    """A dataset is never overwritten: another plan needs another folder."""
    manifest = find_manifest(plan.out)
    if manifest and manifest.plan != plan.digest:
        raise UsageError(
            f"{plan.out} already holds a dataset made from other sources or options",
            hint=f"choose another --out, or delete {join_url(plan.out, MANIFEST_NAME)} and its shards first",
        )


def _first_documents(sources: Sequence[Source], options: Options) -> list[str]:
    """The start of the first documents of the first source; bad records are the map task's to report."""
    source = sources[0]
    stop = source.bytes if source.units == source.bytes else 1
    texts: list[str] = []
    for documents in read_piece(source, Piece(source=0, start=0, stop=stop), options.reading):
        wanted = min(len(documents.texts), _FIRST_DOCUMENTS - len(texts))
        texts += [documents.texts.text(number)[:_FIRST_CHARS] for number in range(wanted)]
        if len(texts) >= _FIRST_DOCUMENTS:
            break
    return texts


def _write_once(path: Path, text: str) -> None:
    if not path.exists():
        with new_file(path) as file:
            file.write(text.encode())
