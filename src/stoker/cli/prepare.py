"""`stoker prepare`: raw data to shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.values import size
from stoker.errors import BadShardError, UsageError
from stoker.storage import is_local, local_path
from stoker.world import World, usable_cores

if TYPE_CHECKING:
    from stoker.cli.progress import Progress
    from stoker.launch.local import LocalPool
    from stoker.launch.pods import Pods
    from stoker.launch.slurm import SlurmArray
    from stoker.manifest import Manifest
    from stoker.prepare.finish import Prepared
    from stoker.prepare.plan import Options
    from stoker.prepare.run import Launcher, Submitted


class _DefaultToRun(click.Group):
    """`stoker prepare data/` means `stoker prepare run data/`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


@click.group(cls=_DefaultToRun, invoke_without_command=False)
def command() -> None:
    """Turn raw text into large, shuffled, tokenised shards.

    \b
    stoker prepare data/ --tokenizer tokenizer.json --out corpus/
    stoker prepare 's3://bucket/raw/*.jsonl.zst' --tokenizer gpt2 --out s3://bucket/corpus --work /scratch
    stoker prepare verify corpus/

    `stoker prepare SOURCE...` is short for `stoker prepare run SOURCE...`.
    """


@command.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("--out", required=True, metavar="URL", help="Folder or object-store prefix for the dataset.")
@click.option(
    "--tokenizer",
    required=True,
    metavar="NAME",
    help="A tokenizer.json, its folder, a hub name, or tiktoken:ENCODING.",
)
@click.option("--field", default="text", show_default=True, help="Field or column that holds the text.")
@click.option("--lines", is_flag=True, help="In .txt files each line is a document (else each file).")
@click.option("--split", default="train", show_default=True, help="Split of a Hugging Face dataset.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["megatron", "webdataset"]),
    default="megatron",
    show_default=True,
    help="Megatron .bin/.idx pairs, or WebDataset tars.",
)
@click.option("--zstd", is_flag=True, help="Compress shards block by block (seekable zstd).")
@click.option(
    "--shard-size",
    type=size,
    metavar="SIZE",
    default="512MiB",
    show_default=True,
    help="Target size of a shard.",
)
@click.option("--no-shuffle", is_flag=True, help="Keep the order of the sources.")
@click.option("--seed", default=0, show_default=True, help="Seed of the shuffle.")
@click.option("--epochs", default=1, show_default=True, help="Write this many differently shuffled copies.")
@click.option("--no-dedup", is_flag=True, help="Keep exact copies of a document.")
@click.option(
    "--near-dedup",
    type=float,
    default=0.0,
    metavar="SIMILARITY",
    help="Also drop near copies: documents this similar (0.8, say) to an earlier one.",
)
@click.option("--min-chars", default=1, show_default=True, help="Drop shorter documents.")
@click.option("--max-chars", default=0, help="Drop longer documents.  [default: keep]")
@click.option("--quality", is_flag=True, help="Drop what breaks the Gopher quality rules.")
@click.option(
    "--filter",
    "filter_",
    default="",
    metavar="MODULE:FUNCTION",
    help="Your function of a text: keep it (bool), or keep this instead (str).",
)
@click.option(
    "--eod",
    default="",
    metavar="TOKEN",
    help="End-of-document token, or none.  [default: the tokenizer's own]",
)
@click.option("--bos", default="", metavar="TOKEN", help="Token before each document.  [default: none]")
@click.option(
    "--engine",
    type=click.Choice(["auto", "gigatoken", "fastokens", "huggingface", "tiktoken"]),
    default="auto",
    show_default=True,
    help="What runs the tokenizer; auto is the fastest that is exact.",
)
@click.option(
    "--on-mismatch",
    type=click.Choice(["stop", "fallback"]),
    default="stop",
    show_default=True,
    help="When a fast engine differs from the reference: stop, or start again with the reference.",
)
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    show_default=True,
    help="When a record cannot be read: stop, or skip and count it.",
)
@click.option(
    "--max-document-size",
    type=size,
    metavar="SIZE",
    default="32MiB",
    show_default=True,
    help="A longer record counts as unreadable.",
)
@click.option(
    "--on",
    "where",
    type=click.Choice(["local", "slurm", "ray", "pods"]),
    default="local",
    show_default=True,
    help="Where tasks run; pods: each of an Indexed Job runs this command and does its part.",
)
@click.option("--workers", default=0, help="Tasks at a time.  [default: local: the cores; else no limit]")
@click.option(
    "--sbatch", multiple=True, metavar="OPTION", help="Slurm: an extra sbatch option, as --partition=cpu."
)
@click.option("--detach", is_flag=True, help="Slurm: submit and return; the merge job finishes the dataset.")
@click.option("--ray-address", default="", metavar="ADDRESS", help="Ray: cluster to join.  [default: auto]")
@click.option(
    "--work",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Scratch folder that all tasks see.  [default: inside --out]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def run(sources: tuple[str, ...], **given: Any) -> None:
    """Prepare SOURCES (files, folders, globs, URLs, hf://NAME) into a dataset.

    Run the same command again after a failure or a kill: it does only what is missing.
    """
    from stoker.cli.progress import Progress
    from stoker.prepare.finish import Prepared
    from stoker.prepare.run import prepare, submit

    _check_launch_options(given)
    options = _options(sources, given)
    if given["where"] == "pods" and World.from_environ().node:
        _assist(options, given)
        return
    with Progress() as progress:
        if given["detach"]:
            made = submit(options, _slurm(given, progress), watcher=progress, work=_work(given))
        else:
            with _launcher(given, progress) as launcher:
                made = prepare(options, launcher, watcher=progress, work=_work(given))
    if isinstance(made, Prepared):
        _report(replace(made, url=given["out"]), as_json=given["as_json"])
    else:
        _report_submitted(made, as_json=given["as_json"])


@command.command()
@click.argument("dataset")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def verify(dataset: str, as_json: bool) -> None:
    """Re-read a DATASET and check every file, block, index and count against its manifest."""
    from stoker.prepare.check import verify_dataset

    faults = verify_dataset(dataset)
    if as_json:
        click.echo(json.dumps({"dataset": dataset, "faults": faults}, indent=1))
    for fault in () if as_json else faults:
        click.echo(fault)
    if faults:
        raise BadShardError(
            f"{len(faults)} faults in {dataset}",
            hint="restore those files from a copy, or delete them and run its `stoker prepare` again",
        )
    if not as_json:
        click.echo(f"{dataset} is whole")


@command.command()
@click.argument("dataset")
@click.option("--tokenizer", default="", metavar="NAME", help="The tokenizer its tokens came from, if known.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def index(dataset: str, tokenizer: str, as_json: bool) -> None:
    """Adopt a folder of Megatron or WebDataset shards: index and hash them, write a manifest."""
    from stoker.prepare.check import adopt

    manifest = adopt(dataset, tokenizer=tokenizer)
    facts = {"dataset": dataset, "format": manifest.format, **_sizes(manifest)}
    click.echo(json.dumps(facts, indent=1) if as_json else _lines(facts))


@command.command(hidden=True)
@click.argument("folder", type=click.Path(path_type=Path))
def merge(folder: Path) -> None:
    """Finish the dataset of a work FOLDER whose tasks are done (the last job of a Slurm run)."""
    from stoker.prepare.finish import finish
    from stoker.prepare.job import open_job

    _report(finish(open_job(folder)), as_json=False)


def _options(sources: tuple[str, ...], given: dict[str, Any]) -> Options:
    from stoker.prepare.curate import Curation
    from stoker.prepare.plan import Options
    from stoker.sources.documents import Reading

    return Options(
        sources=sources,
        reading=Reading(
            field=given["field"], lines=given["lines"], max_document_bytes=given["max_document_size"]
        ),
        curation=Curation(
            min_chars=given["min_chars"],
            max_chars=given["max_chars"],
            quality=given["quality"],
            filter=given["filter_"],
        ),
        format=given["format_"],
        shard_bytes=given["shard_size"],
        shuffle=not given["no_shuffle"],
        dedup=not given["no_dedup"],
        **{name: given[name] for name in _SAME_NAME},
    )


_SAME_NAME = (
    "out", "tokenizer", "split", "zstd", "seed", "epochs", "near_dedup", "eod", "bos", "engine",
    "on_error", "on_mismatch",
)  # fmt: skip


def _check_launch_options(given: dict[str, Any]) -> None:
    if given["workers"] < 0:
        raise UsageError(f"{given['workers']} workers do nothing", hint="leave --workers out for the default")
    if given["work"] and not is_local(given["work"]):
        raise UsageError(
            f"--work {given['work']} is no folder of a mounted filesystem",
            hint="name one that all tasks see; only --out and sources may be URLs",
        )
    if given["where"] != "slurm" and (given["detach"] or given["sbatch"]):
        raise UsageError("--detach and --sbatch are about Slurm", hint="add --on slurm, or leave them out")


def _work(given: dict[str, Any]) -> Path | None:
    return local_path(given["work"]) if given["work"] else None


def _slurm(given: dict[str, Any], progress: Progress) -> SlurmArray:
    from stoker.launch.slurm import SlurmArray

    return SlurmArray(entry=ENTRY, options=given["sbatch"], at_once=given["workers"], say=progress.note)


@contextmanager
def _launcher(given: dict[str, Any], progress: Progress) -> Iterator[Launcher]:
    if given["where"] == "slurm":
        yield _slurm(given, progress)
    elif given["where"] == "ray":
        from stoker.launch.ray import RayCluster

        with RayCluster(entry=ENTRY, address=given["ray_address"], at_once=given["workers"]) as cluster:
            yield cluster
    elif given["where"] == "pods":
        with _pods(given) as pods:
            yield pods
    else:
        with _pool(given) as pool:
            yield pool


def _assist(options: Options, given: dict[str, Any]) -> None:
    """The part of a pod that is not the first: no dataset to report."""
    from stoker.cli.progress import Progress
    from stoker.prepare.run import assist

    with Progress() as progress, _pods(given) as pods:
        assist(options, pods, watcher=progress, work=_work(given))


@contextmanager
def _pods(given: dict[str, Any]) -> Iterator[Pods]:
    from stoker.launch.pods import Pods

    with _pool(given) as pool:
        yield Pods(pool, World.from_environ())


@contextmanager
def _pool(given: dict[str, Any]) -> Iterator[LocalPool]:
    from stoker.launch.local import LocalPool

    workers = given["workers"] or usable_cores()
    with LocalPool(workers, entry=ENTRY, preload=("gigatoken", "awkward", "tokenizers")) as pool:
        yield pool


ENTRY = "stoker.prepare.tasks:run_task"


def _report(prepared: Prepared, *, as_json: bool) -> None:
    statistics, manifest = prepared.statistics, prepared.manifest
    facts = {
        "dataset": prepared.url,
        **_sizes(manifest),
        "stage_seconds": prepared.stage_seconds,
        "statistics": statistics.to_plain(),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(_lines({"dataset": prepared.url, **_sizes(manifest)}))
    for word, counts in (("dropped", statistics.dropped), ("skipped", statistics.bad)):
        for reason, count in sorted(counts.items()):
            click.echo(f"{word}  {count:,} documents: {reason}")


def _report_submitted(submitted: Submitted, *, as_json: bool) -> None:
    from stoker.launch.slurm import merge_log

    ids = ",".join(job for jobs in submitted.jobs.values() for job in jobs)
    facts = {
        "dataset": submitted.url,
        "jobs": submitted.jobs,
        "look": f"squeue --job {ids}",
        "work": str(submitted.folder),
        "log": str(merge_log(submitted.folder)),
    }
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    jobs = ", then ".join(f"{stage} {' '.join(jobs)}" for stage, jobs in submitted.jobs.items())
    click.echo(_lines({**facts, "jobs": jobs}))


def _sizes(manifest: Manifest) -> dict[str, Any]:
    return {
        "shards": len(manifest.shards),
        "samples": manifest.samples,
        "tokens": manifest.tokens,
        "bytes": manifest.bytes,
    }


def _lines(facts: dict[str, Any]) -> str:
    return "\n".join(f"{k:8} {v:,}" if isinstance(v, int) else f"{k:8} {v}" for k, v in facts.items())
