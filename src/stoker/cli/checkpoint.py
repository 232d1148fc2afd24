"""`stoker checkpoint`: look at checkpoints, verify, clear up, import, export; suspend a GPU process."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.groups import Group
from stoker.cli.values import choice, given_path, json_option, size
from stoker.errors import BadCheckpointError, UsageError
from stoker.formats.sizes import counted

if TYPE_CHECKING:
    from stoker.checkpoint.saved.reader import Checkpoint
    from stoker.checkpoint.saved.survey import Listed
    from stoker.checkpoint.saved.tiers import Tiers
    from stoker.checkpoint.suspend import Suspended

_REQUEST_S = 60.0  # the longest that a request to a store may take, as in a run
_remote = click.option("--remote", default="", metavar="URL", help="The remote tier of the run.")
_name = click.option("--name", default="", help="Which checkpoint.  [default: the newest whole one]")


@click.group(cls=Group)
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
@json_option
def ls(root: str, remote: str, tensors: bool, as_json: bool) -> None:
    """List the checkpoints in ROOT, the newest first.

    Of one that cannot be used it says why.
    """
    from stoker.checkpoint.foreign.kinds import refuse_strangers
    from stoker.checkpoint.saved.survey import survey

    tiers = _tiers(root, remote)
    rows = [_row(one) for one in survey(tiers)]
    shown = _tensor_rows(tiers) if tensors else []
    if as_json:
        click.echo(json.dumps({"checkpoints": rows, "tensors": shown}, indent=1))
        return
    for row in rows:
        state = _whole_line(row) if row["whole"] else "not usable"
        faults = "".join(f"; {tier}: {why}" for tier, why in row["faults"].items())
        click.echo(f"{row['name']}  {row['tiers']:12}  {state}{faults}")
    for one in shown:
        click.echo(f"{one['name']}  {one['dtype']} {one['shape']}")
    if not rows:
        refuse_strangers(tiers.root)
        click.echo(f"there is no checkpoint in {root}", err=True)


@command.command()
@click.argument("root")
@_remote
@_name
@json_option
def verify(root: str, remote: str, name: str, as_json: bool) -> int:
    """Re-read a checkpoint of ROOT, every copy and every byte of it."""
    from stoker.checkpoint.saved.survey import verify_copies

    tiers = _tiers(root, remote)
    found = _find(tiers, name)
    copies = verify_copies(tiers, found.name)
    faults = [fault for some in copies.values() for fault in some]
    if as_json:
        click.echo(json.dumps({"checkpoint": found.name, "faults": faults, "copies": copies}, indent=1))
        return 1 if faults else 0
    for tier, some in copies.items():
        for fault in some:
            click.echo(f"{tier}: {fault}")
        if not some:
            click.echo(f"{found.name} is whole, {tier}: {found.manifest.bytes:,} bytes")
    if faults:
        raise BadCheckpointError(
            f"{counted(len(faults), 'fault')} in {found.name}",
            hint="restore an older one; `stoker checkpoint ls` lists them",
        )
    return 0


@command.command()
@click.argument("root")
@click.option("--remote", required=True, metavar="URL", help="The remote tier of the run.")
@_name
@json_option
def push(root: str, remote: str, name: str, as_json: bool) -> int:
    """Bring a checkpoint of ROOT to the remote tier.

    For what a run could not drain before it ended. Where nodes have disks of their own, run it on each: the
    last one completes it.
    """
    from stoker.checkpoint.saved.retention import has_local
    from stoker.checkpoint.saved.tiers import local_names
    from stoker.checkpoint.saved.upload import push as bring

    tiers = _tiers(root, remote)
    assert tiers.remote is not None
    known = [one for one in local_names(tiers.root) if name in ("", one) and has_local(tiers.root, one)]
    if not known:
        raise UsageError(
            f"{tiers.root} has no whole checkpoint {name}".rstrip(), hint="`stoker checkpoint ls` lists them"
        )
    chosen = known[0]
    missing = bring(tiers.root / chosen, tiers.remote)
    if as_json:
        click.echo(json.dumps({"checkpoint": chosen, "missing_parts": missing}, indent=1))
        return 1 if missing else 0
    if missing:
        raise BadCheckpointError(
            f"parts {missing} of {chosen} are neither here nor in {remote}",
            hint="run the same command on the nodes that hold them: the last one completes it",
        )
    click.echo(f"{chosen} is in {remote}")
    return 0


@command.command()
@click.argument("root")
@_remote
@click.option(
    "--keep",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Also delete all but the newest N that are good: these are read, every byte.  [default: keep all]",
)
@click.option("--dry-run", is_flag=True, help="Say what would go, delete nothing.")
@json_option
def gc(root: str, remote: str, keep: int, dry_run: bool, as_json: bool) -> None:
    """Delete what dead runs left in ROOT.

    That is unfinished saves, and uploads without a manifest.
    """
    from stoker.checkpoint.saved.survey import clear, sort_out

    found = sort_out(_tiers(root, remote), keep=keep)
    if not dry_run:
        clear(_tiers(root, remote), found)
    if as_json:
        click.echo(
            json.dumps({what: [asdict(one) for one in some] for what, some in found.items()}, indent=1)
        )
        return
    for one in found["garbage"]:
        click.echo(f"{one.name}  {one.tier}, {counted(one.bytes, 'byte')}: {one.why}")
    for one in found["superseded"]:
        click.echo(f"{one.name}  {one.tier}: {one.why}")
    for one in found["left_alone"]:
        click.echo(f"left alone: {one.name}  {one.tier}: {one.why}")
    if not any(found.values()):
        click.echo("nothing to collect")


@command.command()
@click.argument("root")
@click.option("--out", required=True, type=given_path(), help="Folder.")
@_remote
@_name
@choice(
    "--format",
    "kind",
    among=["safetensors", "dcp", "torch"],
    help="dcp: a folder for torch.distributed.checkpoint's own load; torch: a file of torch.save.",
)
@click.option("--prefix", help="Which tensors; left out of their names.  [default: model. and for dcp all]")
@click.option("--shard-size", type=size, default="5GB", show_default=True, help="Size of a safetensors file.")
@json_option
def export(
    root: str,
    out: Path,
    remote: str,
    name: str,
    kind: str,
    prefix: str | None,
    shard_size: int,
    as_json: bool,
) -> None:
    """Write the model of a checkpoint for others.

    Tensors have the names of its state_dict.
    """
    found = _find(_tiers(root, remote), name)
    paths = _export(found, out, kind=kind, prefix=prefix, shard_bytes=shard_size)
    facts = {"checkpoint": found.name, "files": [str(path) for path in paths]}
    click.echo(json.dumps(facts, indent=1) if as_json else "\n".join(facts["files"]))


def _export(found: Checkpoint, out: Path, *, kind: str, prefix: str | None, shard_bytes: int) -> list[Path]:
    if kind == "safetensors":
        from stoker.checkpoint.saved.export import export as write

        return write(found, out, prefix="model." if prefix is None else prefix, shard_bytes=shard_bytes)
    from stoker.checkpoint.foreign.exporting import export_dcp, export_torch

    if kind == "dcp":
        return export_dcp(found, out, prefix=prefix or "")
    return export_torch(found, out, prefix="model." if prefix is None else prefix)


@command.command(name="import")
@click.argument("source")
@click.option("--out", required=True, type=given_path(file_okay=False), help="Run folder.")
@click.option("--step", type=click.IntRange(min=0), help="Its step.  [default: as the source says, or 0]")
@click.option(
    "--rename", multiple=True, metavar="OLD=NEW", help="A beginning of names, and what replaces it."
)
@json_option
def import_(source: str, out: Path, step: int | None, rename: tuple[str, ...], as_json: bool) -> None:
    """Make a checkpoint of others the newest of a run folder.

    SOURCE is a folder of torch.distributed.checkpoint, of a Hugging Face model or of Megatron's torch_dist,
    or a file of torch.save, safetensors or Lightning. No code in it is run.
    """
    from stoker.checkpoint.foreign.importing import import_checkpoint
    from stoker.checkpoint.foreign.opening import open_source

    found = open_source(source, rename=_pairs(rename))
    name = import_checkpoint(found, out, step=step)
    made = _find(_tiers(str(out), ""), name)
    objects = sorted({str(piece.box.path[0]) for _, piece in made.pieces()})
    facts = {"checkpoint": name, "step": made.step, "bytes": made.manifest.bytes, "objects": objects}
    said = f"{out / name}: step {made.step}, {made.manifest.bytes:,} bytes, {', '.join(objects)}"
    click.echo(json.dumps(facts, indent=1) if as_json else said)


def _pairs(rename: tuple[str, ...]) -> dict[str, str]:
    for one in rename:
        if "=" not in one:
            raise UsageError(f"--rename {one} has no =", hint="give OLD=NEW, say app.model.=model.")
    return {old: new for old, _, new in (one.partition("=") for one in rename)}


@command.command()
@click.argument("root")
@click.argument("names", nargs=-1)
@click.option("--remove", is_flag=True, help="Let go of them again.")
def pin(root: str, names: tuple[str, ...], remove: bool) -> None:
    """Keep checkpoints of ROOT for good, whatever `keep` says.

    Without NAMES: list those that are pinned.
    """
    from stoker.checkpoint.saved.keep import read_pins, write_pins

    tiers = _tiers(root, "")
    pinned = read_pins(tiers.root)
    for name in names:
        if not remove and name not in tiers.names():
            raise UsageError(f"{root} has no checkpoint {name}", hint="`stoker checkpoint ls` lists them")
    if names:
        pinned = pinned - set(names) if remove else pinned | set(names)
        write_pins(tiers.root, pinned)
    for name in sorted(pinned):
        click.echo(name)


@command.command()
@click.argument("root")
@click.argument("one")
@click.argument("other", default="")
@_remote
@json_option
def diff(root: str, one: str, other: str, remote: str, as_json: bool) -> None:
    """What differs between two checkpoints of ROOT.

    OTHER is the newest unless it is named.
    """
    from stoker.checkpoint.saved.export import diff as compare

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
    type=given_path(file_okay=False),
    help="Write the process here too, with CRIU.",
)
@json_option
def suspend(pid: int, image: Path | None, as_json: bool) -> None:
    """Stop the GPU work of process PID and free its GPU memory."""
    from stoker.checkpoint.suspend import suspend as stop

    _report_suspended(stop(pid, image=image), as_json)


@command.command()
@click.argument("pid", type=int)
@click.option("--image", type=given_path(file_okay=False), help="Its CRIU image, if any.")
@json_option
def resume(pid: int, image: Path | None, as_json: bool) -> None:
    """Bring a suspended process PID back onto its GPU and let it go on."""
    from stoker.checkpoint.suspend import resume as go_on

    _report_suspended(go_on(pid, image=image), as_json)


def _report_suspended(found: Suspended, as_json: bool) -> None:
    said = f"process {found.pid} is {found.state} after {found.seconds:.1f} s"
    click.echo(json.dumps(asdict(found), indent=1) if as_json else said)


def _tiers(root: str, remote: str) -> Tiers:
    from stoker.checkpoint.saved.tiers import Tiers
    from stoker.storage import local_path, open_store

    path = local_path(root)
    if not path.is_dir() and not remote:
        raise UsageError(f"{root} is no folder", hint="give the folder that the Checkpointer was made with")
    return Tiers(root=path, remote=open_store(remote, timeout_s=_REQUEST_S) if remote else None)


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
        kind = (
            BadCheckpointError if skipped else UsageError
        )  # what is damaged was found, what is absent was not
        raise kind(f"{tiers.root} has no whole checkpoint", hint="`stoker checkpoint ls` says what is there")
    return found


def _row(one: Listed) -> dict[str, Any]:
    row: dict[str, Any] = {"name": one.name, "tiers": "+".join(one.tiers), "whole": one.manifest is not None}
    row |= {"faults": one.faults, "why": "; ".join(one.faults.values())}
    if one.manifest is None:
        return row
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.manifest.saved_at))
    facts: dict[str, Any] = {"step": one.manifest.step, "bytes": one.manifest.bytes}
    facts |= {"ranks": len(one.manifest.parts), "marks": one.manifest.marks.to_plain()}
    return {**row, "saved": saved, **facts}


def _whole_line(row: dict[str, Any]) -> str:
    marks = (str(value) if key == "reason" else f"{key} {value}" for key, value in row["marks"].items())
    return "  ".join([f"{row['bytes']:>15,}  {row['saved']}", *marks])


def _tensor_rows(tiers: Tiers) -> list[dict[str, Any]]:
    from stoker.checkpoint.saved.export import Tensors

    tensors = Tensors(_find(tiers, ""))
    boxes = (tensors.box(name) for name in tensors.names())
    return [{"name": box.name, "dtype": box.dtype, "shape": list(box.shape)} for box in boxes]
