"""Driver of a preparation: plan, run the stages through a launcher, finish with the manifest.

Nothing here knows how a task is run, and no task knows who runs it. Everything lives in a work folder
named by the plan's digest: the same command finds what an earlier, killed one left and does the rest.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import xxhash

from stoker.errors import EngineMismatchError, StokerError, UsageError, require
from stoker.formats.sizes import counted
from stoker.formats.zstd import zstd_module
from stoker.manifest import TokenizerRecord
from stoker.prepare import tokens
from stoker.prepare.chats import chat_template
from stoker.prepare.finish import Prepared, already_there, check_out, check_stage, clean_up, finish
from stoker.prepare.job import TOKENIZER_NAME, Job
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.leftovers import sweep
from stoker.prepare.media.planning import captions_of, check_media, check_text, media_plan
from stoker.prepare.media.sources.discover import find_media
from stoker.prepare.media.sources.listing import keep_listing
from stoker.prepare.plan import Options, Plan, make_plan
from stoker.prepare.portions import Share
from stoker.prepare.sources.chat import compiled
from stoker.prepare.sources.discover import check_reading, discover, look_at
from stoker.prepare.sources.documents import Piece, Source
from stoker.prepare.sources.read import read_piece
from stoker.prepare.tokens import Tokenizer
from stoker.storage import is_local, local_path, new_file

# What an engine is tried on before it is chosen: documents of up to four files of each source named.
_FIRST_DOCUMENTS, _FIRST_CHARS, _FEWEST = 64, 4096, 2
_TRIED, _TRIED_AT_MOST = 4, 64


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
    if done := _done_before(job, watcher):
        return done
    try:
        return _make(job, launcher, watcher)
    except EngineMismatchError:
        clean_up(job)  # whatever runs next is another plan
        raise
    except (OSError, StokerError):
        done = already_there(job.plan)
        if done is None:
            raise
        watcher.note(f"{job.plan.out} was finished by another run of this command")
        clean_up(job)
        return done


def _done_before(job: Job, watcher: Watcher) -> Prepared | None:
    """The dataset, if it is whole already; else the watcher is told what is to be done."""
    if done := already_there(job.plan):
        watcher.note(f"{job.plan.out} is already prepared")
        clean_up(job)  # planning has made the folder anew
        return done
    watcher.planned(job.plan, job.folder)
    return None


def _make(job: Job, launcher: Launcher, watcher: Watcher) -> Prepared:
    if swept := sweep((job.spill(0).parent, *(job.target / part.folder for part in job.plan.parts))):
        watcher.note(f"removed {counted(swept, 'file')} that killed tasks had left half written")
    seconds = {}
    for stage, count in job.plan.stages.items():
        started = time.monotonic()
        run_stage(job, stage, count, launcher, watcher)
        seconds[stage] = round(time.monotonic() - started, 3)
    return replace(finish(job), stage_seconds=seconds)


class Crew(Launcher, Protocol):
    """One of several launchers that share the tasks of a run: `run_ours` waits for no other."""

    def run_ours(
        self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]
    ) -> None: ...


def assist(options: Options, crew: Crew, *, watcher: Watcher, work: Path | None = None) -> None:
    """Do our part of a dataset that another process, which calls `prepare`, finishes."""
    job = plan_job(options, watcher=watcher, work=work)
    if _done_before(job, watcher):
        return
    *before, last = job.plan.stages.items()
    for stage, count in before:
        run_stage(job, stage, count, crew, watcher)
    stage, count = last
    missing = missing_tasks(job, stage, count)
    watcher.stage(stage, total=count, done=count - len(missing))
    # the work folder goes as soon as all is written: what of it is ours is all that may be looked at now
    failed: list[int] = []
    crew.run_ours(job.ledger, stage, missing, _follow(job, stage, watcher, failed))
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
    if done := _done_before(job, watcher):
        return done
    missing = {stage: missing_tasks(job, stage, count) for stage, count in job.plan.stages.items()}
    jobs = queue.submit_all(job.ledger, missing, merge=("stoker.cli", "prepare", "merge", str(job.folder)))
    return Submitted(url=job.plan.out, folder=job.folder, jobs=jobs)


def plan_job(options: Options, *, watcher: Watcher, work: Path | None = None) -> Job:
    """Look at the sources, choose the engine, and write the plan into its folder."""
    look = look_at(lines=options.reading.lines, split=options.split, out=options.out, say=watcher.note)
    found = find_media(_named(options), options.media, look, tokenizer=options.tokenizer)
    tokenizer, record = None, None
    if found:
        check_media(options)
        if options.tokenizer:
            tokenizer = tokens.load_tokenizer(options.tokenizer)
            record = _tried(tokenizer, options, captions_of(found), watcher)
        plan = media_plan(options, found, record, tokenizer)
    else:
        sources = _text_sources(options, watcher)
        tokenizer = tokens.load_tokenizer(options.tokenizer)
        options = _with_template(options, tokenizer)
        record = _tried(tokenizer, options, _first_documents(sources, options), watcher)
        plan = make_plan(options, sources, record, tokenizer.family)
    job = Job(plan=plan, folder=work_folder(plan, work))
    check_out(plan)
    for other in _left_behind(job):
        watcher.note(f"{other} is of a run with other sources or options; if that has ended, delete it")
    for number, listing in (found.listings if found else {}).items():
        keep_listing(listing, job.listing(number))
    if tokenizer:
        _write_down(job.folder / TOKENIZER_NAME, json.dumps(asdict(tokenizer)))
    _write_down(job.folder / "plan.json", plan.to_json())
    return job


def _text_sources(options: Options, watcher: Watcher) -> list[Source]:
    sources = discover(
        _named(options),
        lines=options.reading.lines,
        split=options.split,
        out=options.out,
        say=watcher.note,
    )
    check_text(options)
    shares = {share.path: share for share in options.shares}
    sources = [_with_share(source, shares.get(source.origin)) for source in sources]
    check_reading(sources, lines=options.reading.lines)
    _check_packages(options, sources)
    return sources


def _named(options: Options) -> list[str]:
    """All sources, also those that have a weight or a cap."""
    return [*(share.path for share in options.shares), *options.sources]


def _tried(tokenizer: Tokenizer, options: Options, first: Sequence[str], watcher: Watcher) -> TokenizerRecord:
    """The tokenizer with the engine that runs it, tried on the first documents."""
    engine, refused = tokens.choose_engine(tokenizer, options.engine, first)
    for reason in refused:
        watcher.note(f"not used: {reason}")
    return TokenizerRecord(
        name=options.tokenizer,
        digest=tokenizer.digest,
        vocabulary=tokenizer.vocabulary,
        eod=tokens.choose_eod(tokenizer, options.eod),
        bos=tokens.choose_bos(tokenizer, options.bos),
        engine=engine,
        engine_version=tokens.engine_version(engine),
    )


def _with_template(options: Options, tokenizer: tokens.Tokenizer) -> Options:
    """The tokenizer's own chat template is a part of the plan: a task may run where its files are not."""
    reading = options.reading
    if not reading.chat:
        if reading.conversation.mask:
            raise UsageError(
                "--loss-mask is about chats", hint="name the field of the messages: --chat messages"
            )
        return options
    template, special = chat_template(options.tokenizer)
    compiled(template)  # told now rather than of each document
    conversation = replace(reading.conversation, template=template, special=tuple(special.items()))
    reading = replace(reading, conversation=conversation)
    if not conversation.mask:
        return replace(options, reading=reading)
    if tokenizer.family != "huggingface":
        raise UsageError("a loss mask takes a tokenizer.json", hint="tiktoken does not say where tokens lie")
    # only the reference says where its tokens lie
    return replace(options, reading=reading, engine=tokenizer.reference)


def _with_share(source: Source, share: Share | None) -> Source:
    if share is None:
        return source
    return replace(
        source,
        weight=share.weight,
        max_tokens=share.max_tokens,
        field=share.field,
        template=share.template,
    )


def _check_packages(options: Options, sources: Sequence[Source]) -> None:
    """What only tasks import is missed here, not after an hour in a process on another machine."""
    if options.zstd:
        zstd_module()
    if options.format == "webdataset" or any(source.kind in ("jsonl", "webdataset") for source in sources):
        require("orjson", extra="tokens")


def work_folder(plan: Plan, work: Path | None) -> Path:
    """Where the tasks of this plan keep what they make: in the output folder, unless that is remote. A
    folder of the user's may serve the same plan for several outputs, and their shards must not mix."""
    if work is None:
        if not is_local(plan.out):
            raise UsageError(
                f"{plan.out} is remote, and tasks need a folder they all see",
                hint="name one with --work (about twice the size of the tokens is needed)",
            )
        return local_path(plan.out).resolve() / f".stoker-{plan.digest[:16]}"
    out = str(local_path(plan.out).resolve()) if is_local(plan.out) else plan.out.rstrip("/")
    return work.resolve() / f".stoker-{plan.digest[:16]}-{xxhash.xxh3_64_hexdigest(out.encode())[:8]}"


def run_stage(job: Job, stage: str, count: int, launcher: Launcher, watcher: Watcher) -> None:
    """Run what is missing of one stage; raises with the first failures if any is left."""
    missing = missing_tasks(job, stage, count)
    watcher.stage(stage, total=count, done=count - len(missing))
    # Also where nothing is missing: what an earlier driver left running must end before the folder goes.
    launcher.run(job.ledger, stage, missing, _follow(job, stage, watcher, []))
    check_stage(job, stage, count)


def _follow(job: Job, stage: str, watcher: Watcher, failed: list[int]) -> Callable[[int], None]:
    """Tells the watcher of each task that ended well; one that failed is no step towards the end."""

    def ended(number: int) -> None:
        if job.ledger.failure(stage, number):
            failed.append(number)
        else:
            watcher.advance(stage, number)

    return ended


def missing_tasks(job: Job, stage: str, count: int) -> list[int]:
    """The tasks without a marker, and those whose files an accident has damaged since."""
    missing = job.ledger.missing(stage, count)
    return missing + job.ledger.recheck(stage, sorted(set(range(count)) - set(missing)))


def _first_documents(sources: Sequence[Source], options: Options) -> list[str]:
    """The start of the first documents of sources from the first to the last, one of each name and kind at
    least; bad records are the map task's to report."""
    by_name: dict[tuple[str, str], list[int]] = {}
    for number, source in enumerate(sources):
        by_name.setdefault((source.origin, source.kind), []).append(number)
    spread = [
        numbers[len(numbers) * turn // _TRIED] for numbers in by_name.values() for turn in range(_TRIED)
    ]
    chosen = sorted(dict.fromkeys(spread))[:_TRIED_AT_MOST]
    each = max(_FEWEST, _FIRST_DOCUMENTS // len(chosen))
    return [text for number in chosen for text in _documents_of(sources[number], number, options, each)]


def _documents_of(source: Source, number: int, options: Options, wanted: int) -> list[str]:
    stop = source.bytes if source.units == source.bytes else 1
    texts: list[str] = []
    for documents in read_piece(source, Piece(source=number, start=0, stop=stop), options.reading):
        here = min(len(documents.texts), wanted - len(texts))
        texts += [documents.texts.text(number)[:_FIRST_CHARS] for number in range(here)]
        if len(texts) >= wanted:
            break
    return texts


def _left_behind(job: Job) -> list[Path]:
    """Work folders of other plans in the output folder: each may hold as much as the dataset."""
    if not is_local(job.plan.out):
        return []
    found = local_path(job.plan.out).resolve().glob(".stoker-*/")
    return sorted(path for path in found if path.is_dir() and path not in (job.folder, job.target.parent))


def _write_down(path: Path, text: str) -> None:
    """Unless it says so already: the plan in a folder that was moved names the old one."""
    if not (path.exists() and path.read_bytes() == text.encode()):
        with new_file(path) as file:
            file.write(text.encode())
