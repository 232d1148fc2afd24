"""`stoker checkpoint`: look at checkpoints, verify, clear up, export; suspend a GPU process."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.values import size
from stoker.errors import BadCheckpointError, StokerError, UsageError

if TYPE_CHECKING:
    from stoker.saved.reader import Checkpoint
    from stoker.saved.tiers import Tiers

_remote = click.option("--remote", default="", metavar="URL", help="The remote tier of the run.")
_json = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
_name = click.option("--name", default="", help="Which checkpoint.  [default: the newest whole one]")


@click.group()
def command() -> None:
    """Look after the checkpoints of a run.

    \b
    stoker checkpoint ls /nvme/run1 --remote s3://bucket/run1
    stoker checkpoint export /nvme/run1 --out model/
    """


@command.command()
@click.argument("root")
@_remote
@click.option("--tensors", is_flag=True, help="Also list the tensors of the newest whole one.")
@_json
def ls(root: str, remote: str, tensors: bool, as_json: bool) -> None:
    """List the checkpoints in ROOT, the newest first, and say which cannot be used and why."""
    tiers = _tiers(root, remote)
    near, far = _names(tiers)
    rows = [_row(tiers, name, near=name in near, far=name in far) for name in tiers.names()]
    shown = _tensor_rows(tiers) if tensors else []
    if as_json:
        click.echo(json.dumps({"checkpoints": rows, "tensors": shown}, indent=1))
        return
    for row in rows:
        state = f"{row['bytes']:>15,}  {row['saved']}" if row["whole"] else f"not usable: {row['why']}"
        click.echo(f"{row['name']}  {row['tiers']:12}  {state}")
    for one in shown:
        click.echo(f"{one['name']}  {one['dtype']} {one['shape']}")
    if not rows:
        click.echo(f"there is no checkpoint in {root}", err=True)


@command.command()
@click.argument("root")
@_remote
@_name
@_json
def verify(root: str, remote: str, name: str, as_json: bool) -> None:
    """Re-read a checkpoint of ROOT and check every byte against its digests."""
    found = _find(_tiers(root, remote), name)
    faults = found.verify()
    if as_json:
        click.echo(json.dumps({"checkpoint": found.name, "faults": faults}, indent=1))
    for fault in () if as_json else faults:
        click.echo(fault)
    if faults:
        raise BadCheckpointError(
            f"{len(faults)} faults in {found.name}",
            hint="restore an older one; `stoker checkpoint ls` lists them",
        )
    if not as_json:
        click.echo(f"{found.name} is whole: {found.manifest.bytes:,} bytes")


@command.command()
@click.argument("root")
@_remote
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Also delete all but the newest N.  [default: keep all]",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, delete nothing.")
@_json
def gc(root: str, remote: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete what dead runs left in ROOT: unfinished saves, uploads without a manifest."""
    from stoker.saved.retention import collect, garbage, remote_garbage, remove_remote, retain, superseded

    tiers = _tiers(root, remote)
    found = garbage(tiers.root) if dry_run else collect(tiers.root)
    if tiers.remote is not None:
        uploads = remote_garbage(tiers.remote)
        for one in () if dry_run else uploads:
            remove_remote(tiers.remote, one.name)
        found += uploads
    old = superseded(tiers, keep=keep)[0] if dry_run else retain(tiers, keep=keep)
    if as_json:
        click.echo(json.dumps({"garbage": [asdict(one) for one in found], "superseded": old}, indent=1))
        return
    for one in found:
        click.echo(f"{one.name}  {one.bytes:,} bytes: {one.why}")
    for name in old:
        click.echo(f"{name}: newer ones stand in for it")
    if not found and not old:
        click.echo("nothing to collect")


@command.command()
@click.argument("root")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder.")
@_remote
@_name
@click.option("--prefix", default="model.", show_default=True, help="Which tensors; left out of their names.")
@click.option("--shard-size", type=size, default="5GB", show_default=True, help="Size of a file.")
@_json
def export(root: str, out: Path, remote: str, name: str, prefix: str, shard_size: int, as_json: bool) -> None:
    """Write the model of a checkpoint as safetensors, with the names of its state_dict."""
    from stoker.saved.export import export as write

    found = _find(_tiers(root, remote), name)
    paths = write(found, out, prefix=prefix, shard_bytes=shard_size)
    facts = {"checkpoint": found.name, "files": [str(path) for path in paths]}
    click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(facts["files"]))


@command.command()
@click.argument("root")
@click.argument("one")
@click.argument("other", default="")
@_remote
@_json
def diff(root: str, one: str, other: str, remote: str, as_json: bool) -> None:
    """What differs between two checkpoints of ROOT: ONE and OTHER (by default the newest)."""
    from stoker.saved.export import diff as compare

    tiers = _tiers(root, remote)
    first, second = _find(tiers, one), _find(tiers, other)
    found = compare(first, second)
    if as_json:
        facts = {"one": first.name, "other": second.name, "differences": [asdict(each) for each in found]}
        click.echo(json.dumps(facts, indent=1))
        return
    for each in found:
        most = f", by {each.most:.6g} at most" if each.most is not None else ""
        click.echo(f"{each.name}: {each.what}{most}")
    if not found:
        click.echo(f"{first.name} and {second.name} hold the same")


@command.command()
@click.argument("pid", type=int)
@click.option(
    "--image",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the process here too, with CRIU.",
)
@_json
def suspend(pid: int, image: Path | None, as_json: bool) -> None:
    """Stop the GPU work of process PID and free its GPU memory for another job."""
    from stoker.suspend import suspend as stop

    _report_suspended(asdict(stop(pid, image=image)), as_json)


@command.command()
@click.argument("pid", type=int)
@click.option("--image", type=click.Path(path_type=Path, file_okay=False), help="Its CRIU image, if any.")
@_json
def resume(pid: int, image: Path | None, as_json: bool) -> None:
    """Bring a suspended process PID back onto its GPU and let it go on."""
    from stoker.suspend import resume as go_on

    _report_suspended(asdict(go_on(pid, image=image)), as_json)


def _report_suspended(facts: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(f"process {facts['pid']} is {facts['state']} after {facts['seconds']:.1f} s")


def _tiers(root: str, remote: str) -> Tiers:
    from stoker.saved.tiers import Tiers
    from stoker.storage import local_path, open_store

    path = local_path(root)
    if not path.is_dir() and not remote:
        raise UsageError(f"{root} is no folder", hint="give the folder that the Checkpointer was made with")
    return Tiers(root=path, remote=open_store(remote) if remote else None)


def _names(tiers: Tiers) -> tuple[set[str], set[str]]:
    from stoker.saved.tiers import local_names

    return set(local_names(tiers.root)), set(tiers.remote_names())


def _find(tiers: Tiers, name: str) -> Checkpoint:
    if name:
        if name not in tiers.names():
            raise UsageError(
                f"{tiers.root} has no checkpoint {name}", hint="`stoker checkpoint ls` lists them"
            )
        return tiers.checkpoint(name)
    skipped: list[str] = []
    found = tiers.latest(skipped=skipped)
    for one in skipped:
        click.echo(f"skipped {one}", err=True)
    if found is None:
        raise BadCheckpointError(
            f"{tiers.root} has no whole checkpoint", hint="`stoker checkpoint ls` says what is there"
        )
    return found


def _row(tiers: Tiers, name: str, *, near: bool, far: bool) -> dict[str, Any]:
    where = "+".join(["local"] * near + ["remote"] * far)
    try:
        found = tiers.checkpoint(name)
        found.check()
    except StokerError as error:
        return {"name": name, "tiers": where, "whole": False, "why": error.message}
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.manifest.saved_at))
    facts = {"step": found.step, "bytes": found.manifest.bytes, "ranks": len(found.manifest.parts)}
    return {"name": name, "tiers": where, "whole": True, "saved": saved, **facts}


def _tensor_rows(tiers: Tiers) -> list[dict[str, Any]]:
    from stoker.saved.export import Tensors

    tensors = Tensors(_find(tiers, ""))
    boxes = (tensors.box(name) for name in tensors.names())
    return [{"name": box.name, "dtype": box.dtype, "shape": list(box.shape)} for box in boxes]
