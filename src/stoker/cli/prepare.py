"""`stoker prepare`: raw data to shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.groups import DefaultToRun
from stoker.cli.media import media_options
from stoker.cli.prepared import facts_lines, report_prepared, report_submitted, sizes
from stoker.cli.values import choice, existing, given_path, json_option, size
from stoker.errors import BadShardError, UsageError
from stoker.formats.sizes import counted
from stoker.machine.allowed import usable_cores
from stoker.storage import is_local, local_path
from stoker.world import World

if TYPE_CHECKING:
    from stoker.cli.progress import Progress
    from stoker.prepare.launch.local import LocalPool
    from stoker.prepare.launch.pods import Pods
    from stoker.prepare.launch.slurm import SlurmArray
    from stoker.prepare.plan import Options
    from stoker.prepare.run import Launcher


@click.group(cls=DefaultToRun)
def command() -> None:
    """Turn raw text or media into large, shuffled shards.

    \b
    stoker prepare data/ --tokenizer tokenizer.json --out corpus/
    stoker prepare 's3://bucket/raw/*.jsonl.zst' --tokenizer gpt2 --out s3://bucket/corpus --work /scratch
    stoker prepare photos/ --out images/
    stoker prepare verify corpus/

    `stoker prepare SOURCE...` is short for `stoker prepare run SOURCE...`.
    """


@command.command()
@click.argument("sources", nargs=-1, metavar="SOURCE...")
@click.option(
    "--source",
    "shares",
    multiple=True,
    metavar="path=...,weight=...",
    help="A source with a weight, a cap (max-tokens=1e9), a field= or template= of its own.",
)
@click.option("--out", required=True, metavar="URL", help="Folder or object-store prefix for the dataset.")
@click.option(
    "--tokenizer",
    default="",
    metavar="NAME",
    help="A tokenizer.json, its folder, a hub name, or tiktoken:ENCODING. Media needs none: for captions.",
)
@choice("--kind", among=["auto", "text", "media"], help="What sources hold; auto looks at them.")
@click.option(
    "--field", default="text", show_default=True, help="Field or column that holds the text, as data.text."
)
@click.option(
    "--template", default="", metavar="TEXT", help=r"Several fields joined, as '{title}\n\n{body}'."
)
@click.option(
    "--chat",
    default="",
    metavar="FIELD",
    help="Field of chat messages, rendered by the tokenizer's chat template.",
)
@click.option(
    "--loss-mask",
    is_flag=True,
    help="With --chat: also write which tokens are the assistant's (1) or not (0).",
)
@click.option("--lines", is_flag=True, help="In .txt files each line is a document (else each file).")
@click.option(
    "--holdout",
    default="",
    metavar="NAME=SHARE,...",
    help="Parts held out by content, as validation=0.01,test=0.01: datasets in folders below --out.",
)
@click.option("--split", default="train", show_default=True, help="Split of a Hugging Face dataset.")
@choice(
    "--format",
    among=["megatron", "webdataset"],
    help="Megatron .bin/.idx pairs, or WebDataset tars, which media always becomes.",
)
@click.option("--zstd", is_flag=True, help="Compress shards block by block (seekable zstd).")
@click.option(
    "--shard-size",
    "shard_bytes",
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
    metavar="SIMILARITY",
    help="Also drop near copies: documents (0.8, say) or images (0.9) this similar.  [default: the recipe's]",
)
@click.option(
    "--curate",
    default="none",
    show_default=True,
    metavar="web|none|FILE",
    help="Steps that documents pass: those of a web corpus, none, or a YAML file's.",
)
@click.option(
    "--languages",
    default="",
    metavar="CODE,...",
    callback=lambda context, option, value: tuple(code for code in (value or "").split(",") if code),
    help="Keep documents of these languages, as en,ko.",
)
@click.option("--min-chars", default=1, show_default=True, help="Drop shorter documents.")
@click.option("--max-chars", default=0, help="Drop longer documents.  [default: keep]")
@click.option("--quality", is_flag=True, help="Drop what breaks the Gopher quality and repetition rules.")
@click.option(
    "--filter",
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
@choice(
    "--engine",
    among=["auto", "gigatoken", "fastokens", "huggingface", "tiktoken"],
    help="What runs the tokenizer; auto is the fastest that is exact.",
)
@choice(
    "--on-mismatch",
    among=["stop", "fallback"],
    help="When a fast engine differs from the reference: stop, or start again with the reference.",
)
@choice(
    "--on-error",
    among=["stop", "skip", "keep"],
    help="When a record cannot be read: stop, or skip and count it; keep, of media, what does not decode.",
)
@media_options
@click.option(
    "--max-document-size",
    "max_document_bytes",
    type=size,
    metavar="SIZE",
    default="32MiB",
    show_default=True,
    help="A longer record counts as unreadable.",
)
@choice(
    "--on",
    "where",
    among=["local", "slurm", "ray", "pods"],
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
    type=given_path(file_okay=False),
    metavar="DIR",
    help="Scratch folder that all tasks see.  [default: inside --out]",
)
@json_option
def run(sources: tuple[str, ...], **given: Any) -> None:
    """Prepare SOURCES into a dataset.

    A source is a file, a folder, a glob, a URL or hf://NAME. Run the same command again after a failure or
    a kill: it does only what is missing.
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
        report_prepared(replace(made, url=given["out"]), as_json=given["as_json"])
    else:
        report_submitted(made, as_json=given["as_json"])


@command.command()
@click.argument("dataset", type=existing)
@json_option
def verify(dataset: str, as_json: bool) -> int:
    """Re-read a DATASET and check it against its manifest.

    Every file, block, index and count is checked.
    """
    from stoker.prepare.check import verify_dataset

    faults = verify_dataset(dataset)
    if as_json:
        click.echo(json.dumps({"dataset": dataset, "faults": faults}, indent=1))
        return 1 if faults else 0
    for fault in faults:
        click.echo(fault)
    if faults:
        raise BadShardError(
            f"{counted(len(faults), 'fault')} in {dataset}",
            hint="restore those files from a copy, or delete them and run its `stoker prepare` again",
        )
    click.echo(f"{dataset} is whole")
    return 0


@command.command()
@click.argument("dataset", type=existing)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write a page.")
@json_option
def report(dataset: str, html: Path | None, as_json: bool) -> None:
    """Show what became of the documents of a DATASET.

    From documents in to tokens out, by step and source, with samples of what was dropped.
    """
    from stoker.manifest import read_manifest
    from stoker.prepare.finish import read_statistics
    from stoker.report import curation
    from stoker.storage import new_file

    manifest, statistics = read_manifest(dataset), read_statistics(dataset)
    if html:
        with new_file(html) as file:
            # names may hold bytes that are no UTF-8
            file.write(curation.page(dataset, manifest, statistics).encode(errors="backslashreplace"))
    if as_json:
        click.echo(
            json.dumps({"dataset": dataset, **sizes(manifest), "statistics": statistics.to_plain()}, indent=1)
        )
    elif html:
        click.echo(f"wrote {html}")
    else:
        click.echo("\n".join(curation.lines(dataset, manifest, statistics)))


@command.command()
@click.argument("dataset", type=existing)
@click.option("--tokenizer", default="", metavar="NAME", help="The tokenizer its tokens came from, if known.")
@json_option
def index(dataset: str, tokenizer: str, as_json: bool) -> None:
    """Adopt a folder of Megatron or WebDataset shards.

    They are indexed and hashed, and the manifest written.
    """
    from stoker.prepare.check import adopt

    manifest = adopt(dataset, tokenizer=tokenizer)
    facts = {"dataset": dataset, "format": manifest.format, **sizes(manifest)}
    click.echo(json.dumps(facts, indent=1) if as_json else facts_lines(facts))


@command.command(hidden=True)
@click.argument("folder", type=given_path())
def merge(folder: Path) -> None:
    """Finish the dataset of a work FOLDER whose tasks are done (the last job of a Slurm run)."""
    from stoker.prepare.finish import finish
    from stoker.prepare.job import open_job

    report_prepared(finish(open_job(folder)), as_json=False)


def _options(sources: tuple[str, ...], given: dict[str, Any]) -> Options:
    from stoker.prepare.curate.recipe import read_recipe, with_flags
    from stoker.prepare.media.recipe import MediaOptions
    from stoker.prepare.plan import Options
    from stoker.prepare.portions import parse_holdout, parse_share
    from stoker.prepare.sources.documents import Conversation, Reading

    flags = {name: given[name] for name in ("min_chars", "max_chars", "quality", "filter", "languages")}
    shares = tuple(map(parse_share, given.pop("shares")))
    holdout = parse_holdout(given.pop("holdout"))
    if not (sources or shares):
        raise UsageError(
            "there is nothing to prepare", hint="name files, folders or URLs, or --source path=..."
        )
    recipe = with_flags(read_recipe(given["curate"]), **flags)
    return Options(
        sources=sources,
        shares=shares,
        holdout=holdout,
        reading=Reading(**_chosen(Reading, given), conversation=Conversation(mask=given["loss_mask"])),
        media=MediaOptions(**_chosen(MediaOptions, given)),
        curation=recipe.curation,
        near_dedup=recipe.near_dedup if given["near_dedup"] is None else given["near_dedup"],
        shuffle=not given["no_shuffle"],
        dedup=not given["no_dedup"],
        **{name: value for name, value in _chosen(Options, given).items() if name != "near_dedup"},
    )


def _chosen(kind: type[Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options that are fields of a record of this kind: they have the same names."""
    return {one.name: given[one.name] for one in fields(kind) if one.name in given}


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
    from stoker.prepare.launch.slurm import SlurmArray

    return SlurmArray(entry=ENTRY, options=given["sbatch"], at_once=given["workers"], say=progress.note)


def _launcher(given: dict[str, Any], progress: Progress) -> AbstractContextManager[Launcher]:
    if given["where"] == "slurm":
        return nullcontext(_slurm(given, progress))
    if given["where"] == "ray":
        from stoker.prepare.launch.ray import RayCluster

        return RayCluster(entry=ENTRY, address=given["ray_address"], at_once=given["workers"])
    return _pods(given) if given["where"] == "pods" else _pool(given)


def _assist(options: Options, given: dict[str, Any]) -> None:
    """The part of a pod that is not the first: no dataset to report."""
    from stoker.cli.progress import Progress
    from stoker.prepare.run import assist

    with Progress() as progress, _pods(given) as pods:
        assist(options, pods, watcher=progress, work=_work(given))


@contextmanager
def _pods(given: dict[str, Any]) -> Iterator[Pods]:
    from stoker.prepare.launch.pods import Pods

    with _pool(given) as pool:
        yield Pods(pool, World.from_environ())


def _pool(given: dict[str, Any]) -> LocalPool:
    from stoker.prepare.launch.local import LocalPool

    workers = given["workers"] or usable_cores()
    preload = ("gigatoken", "awkward", "tokenizers") if given["tokenizer"] else ("PIL.Image",)
    return LocalPool(workers, entry=ENTRY, preload=preload)


ENTRY = "stoker.prepare.tasks:run_task"
