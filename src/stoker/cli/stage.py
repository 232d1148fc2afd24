"""`stoker stage`: files to this node, once, however many ask."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.groups import DefaultToRun
from stoker.cli.values import existing, given_path, json_option, size
from stoker.errors import UsageError
from stoker.formats.sizes import counted

if TYPE_CHECKING:
    from stoker.stage.near import Near
    from stoker.stage.run import Staged


_CACHE = click.option(
    "--cache",
    type=given_path(file_okay=False),
    metavar="DIR",
    help="Folder the files go to.  [default: $STOKER_CACHE, else stoker-cache-UID in the temporary folder]",
)


@click.group(cls=DefaultToRun)
def command() -> None:
    """Bring datasets, models and files next to the GPU.

    \b
    stoker stage s3://bucket/corpus --cache /nvme/stoker
    stoker stage hf://meta-llama/Llama-3.1-8B --hub-cache --cache /nvme/hub
    stoker stage ls --cache /nvme/stoker

    `stoker stage URL...` is short for `stoker stage run URL...`.
    """


@command.command()
@click.argument("urls", nargs=-1, required=True, metavar="URL...", type=existing)
@_CACHE
@click.option(
    "--budget",
    type=size,
    metavar="SIZE",
    default="0",
    help="Bytes the folder may hold; the longest unused files give way.  [default: no limit]",
)
@click.option(
    "--share",
    default="",
    metavar="NODE/NODES",
    help="Only what this node will read of a dataset: 0/16 is the first of 16.",
)
@click.option(
    "--limit-rate", type=size, metavar="SIZE", default="0", help="Bytes per second.  [default: no limit]"
)
@click.option(
    "--shared",
    is_flag=True,
    help="The folder is a group's (chmod 3770), whose members need not trust each other.",
)
@click.option("--hub-cache", is_flag=True, help="Lay hub repositories out as the Hugging Face cache does.")
@click.option(
    "--preload",
    type=click.Choice(["page-cache", "shm"]),
    help="Also bring the files into memory, as far as they fit.",
)
@click.option(
    "--verify",
    is_flag=True,
    help="Also read what lies here already; fetch again what has changed on the disk.",
)
@json_option
def run(urls: tuple[str, ...], **given: Any) -> None:
    """Bring what each URL names to this node.

    URLs are s3://, gs://, az://, http(s)://, hf://, or a path on NFS or Lustre. A prefix with a manifest is
    a dataset, one without is a folder. Any number of processes and containers may run this at once with the
    same folder: every file comes once. Run the same command again after a failure or a kill: it fetches
    only what is missing.
    """
    from stoker.cli.staging import StageProgress
    from stoker.stage.cache import Cache
    from stoker.stage.run import stage

    choose = _share(given["share"])
    staged = []
    with (
        StageProgress() as progress,
        Cache(
            given["cache"],
            budget=given["budget"],
            limit_rate=given["limit_rate"],
            shared=given["shared"],
            hub_cache=given["hub_cache"],
            preload=given["preload"] or "",
            keep_in_memory=True,
            past_cache=not given["preload"],
        ) as cache,
    ):
        for url in urls:
            doubt = cache.shelf.damaged if given["verify"] else None
            staged.append(stage(url, cache, choose=choose, doubt=doubt, watcher=progress))
    _report(staged, as_json=given["as_json"])


@command.command("ls")
@_CACHE
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def ls(cache: Path | None, as_json: bool) -> None:
    """List a cache folder: how much, when last used, read by whom."""
    from stoker.stage.disk.holdings import held_folders

    found = held_folders(cache)
    if as_json:
        click.echo(json.dumps([folder.as_plain() for folder in found], indent=1))
        return
    for folder in found:
        ago = _ago(time.time() - folder.used_at)
        readers = f", read by {', '.join(folder.holders)}" if folder.holders else ""
        held = f"{counted(folder.bytes, 'byte')} in {counted(folder.files, 'file')}"
        click.echo(f"{folder.path}  {held}, used {ago} ago{readers}")


def _share(text: str) -> Callable[[Near], Iterable[str]] | None:
    if not text:
        return None
    from stoker.load.needs import share_of
    from stoker.load.reading.dataset import brought, read_books
    from stoker.manifest import BLOCKS_NAME, NAME
    from stoker.stage.run import parse_share

    node, nodes = parse_share(text)

    def choose(near: Near) -> Iterable[str]:
        if near.collection.kind != "dataset":
            raise UsageError(
                f"{near.collection.url} has no manifest to share out",
                hint="leave --share out, or stage a dataset",
            )
        manifest, _ = read_books(brought(near), near)
        return [NAME, BLOCKS_NAME, *share_of(manifest, node=node, nodes=nodes)]

    return choose


def _report(staged: list[Staged], *, as_json: bool) -> None:
    facts = [{**asdict(one), "path": str(one.path), "seconds": round(one.seconds, 3)} for one in staged]
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    for one in facts:
        for name, value in one.items():
            label = name.removesuffix("_bytes")
            if isinstance(value, tuple):
                if value:
                    click.echo(f"{label:8} {len(value):,}, fetched again")
            else:
                click.echo(f"{label:8} {value:,}" if isinstance(value, int) else f"{label:8} {value}")


def _ago(seconds: float) -> str:
    for unit, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
