"""`stoker doctor`: is this machine fit to feed GPUs, and what mends it?"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.cli.values import given_path
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.doctor.check import Result
    from stoker.doctor.need import Need
    from stoker.machine.snapshot import Snapshot

_EXAMINE_EVERY_S = 30.0
_FILE = given_path(dir_okay=False)


@click.command()
@click.argument("snapshot", required=False, type=_FILE, metavar="[SNAP.json]")
@click.option("--data", type=given_path(), metavar="PATH", help="Where the training data lies.")
@click.option(
    "--cache",
    type=given_path(file_okay=False),
    metavar="DIR",
    help="Where staged data is to lie.  [default: $STOKER_CACHE, else the temporary folder]",
)
@click.option(
    "--for",
    "need",
    type=_FILE,
    metavar="FILE",
    help="What the job needs: the JSON of `stoker plan`, or a loader's workers, prefetch and batch_bytes.",
)
@click.option(
    "--try",
    "active",
    is_flag=True,
    help="Try as well: write and read 64 MiB in the folders of --cache and --data, lock memory, copy to each "
    "card, one all-reduce. Takes seconds.",
)
@click.option("--record", type=_FILE, metavar="FILE", help="Write what was read, to be examined elsewhere.")
@click.option("--fix", is_flag=True, help="Show what can safely be changed here, ask, and change it.")
@click.option("--dry-run", is_flag=True, help="With --fix: only show.")
@click.option("--yes", is_flag=True, help="With --fix: do not ask.")
@click.option(
    "--metrics",
    default=None,
    metavar="[HOST:]PORT",
    help="Examine the machine again and again, and serve the results to Prometheus.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def command(
    snapshot: Path | None,
    data: Path | None,
    cache: Path | None,
    need: Path | None,
    active: bool,
    record: Path | None,
    fix: bool,
    dry_run: bool,
    yes: bool,
    metrics: str | None,
    as_json: bool,
) -> int:
    """Check a machine: is it fit to feed GPUs, and what mends it.

    \b
    stoker doctor --cache /nvme/stoker --data /lustre/corpus
    stoker doctor --for plan.json
    stoker doctor --record node7.json; stoker doctor node7.json

    It needs no root, no GPU and no torch. The exit code is 1 if a check fails, so that an init container
    can gate on it; warnings and what could not be read do not fail.
    """
    from stoker.doctor.examine import worst
    from stoker.doctor.need import Need, read_need

    if (dry_run or yes) and not fix:
        raise UsageError("--dry-run and --yes say how to --fix", hint="add --fix, or leave them out")
    wanted = read_need(need) if need else Need()
    if snapshot is not None:
        if data or cache or active or record or fix or metrics:
            raise UsageError(
                f"{snapshot} is a recorded machine: --data, --cache, --try, --record, --fix and --metrics "
                "are for this one",
                hint="leave them out, or leave the recording out",
            )
        results = _recorded(snapshot, wanted)
    elif metrics:
        if active:
            raise UsageError("--metrics looks again and again, and --try is no load to leave running")
        _serve(metrics, lambda: _live(_reader(data, cache), None, wanted))
        return 0
    else:
        reader = _tried(data, cache) if active else _reader(data, cache)
        results = _live(reader, record, wanted)
        if fix and _change(results, dry_run=dry_run, yes=yes):
            results = _live(reader, None, wanted)
    _report(results, as_json=as_json)
    return 1 if worst(results) == "fail" else 0


def _recorded(path: Path, need: Need) -> list[Result]:
    from stoker.doctor.examine import examine
    from stoker.machine.snapshot import read_snapshot

    return examine(read_snapshot(path), need=need)


def _reader(data: Path | None, cache: Path | None) -> Callable[[], Snapshot]:
    from stoker.machine.read import read_machine

    return lambda: read_machine(data=data, cache=cache)


def _tried(data: Path | None, cache: Path | None) -> Callable[[], Snapshot]:
    from stoker.doctor.trying.run import tried

    read = _reader(data, cache)
    return lambda: tried(read())


def _live(read: Callable[[], Snapshot], record: Path | None, need: Need) -> list[Result]:
    from stoker.doctor.examine import examine
    from stoker.machine.snapshot import write_snapshot

    machine = read()
    if record is not None:
        write_snapshot(machine, record)
    return examine(machine, need=need)


def _serve(where: str, examine_now: Callable[[], list[Result]]) -> None:
    """Answer until somebody ends us; how the machine is does not change between two scrapes."""
    from stoker.doctor.health import expose
    from stoker.formats.prometheus import CONTENT_TYPE
    from stoker.report.serve import Address, Answer, Server, token_for

    lock, told = threading.Lock(), [(-math.inf, b"")]

    def answer() -> Answer:
        with lock:
            if time.monotonic() - told[0][0] > _EXAMINE_EVERY_S:
                told[0] = time.monotonic(), expose(examine_now(), node=os.uname().nodename).encode()
            return Answer(content_type=CONTENT_TYPE, body=told[0][1])

    address = Address.parse(where)
    with Server(address, {"/metrics": answer}, token=token_for(address)) as server:
        click.echo(f"machine: {server.url_of('/metrics')}", err=True)
        threading.Event().wait()


def _change(results: list[Result], *, dry_run: bool, yes: bool) -> bool:
    """Show and make the safe changes; whether any was made."""
    from stoker.doctor.examine import shown
    from stoker.doctor.fix import apply, changes_of

    changes = changes_of(results)
    for change in changes:
        click.echo(f"change: {shown(change.do)}\n  undo: {shown(change.undo)}", err=True)
    if not changes:
        click.echo("nothing here that can safely be changed", err=True)
    if dry_run or not changes:
        return False
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("nobody is there to ask", hint="add --yes to change it, --dry-run to only look")
        if not click.confirm("Make these changes?", err=True):
            return False
    apply(changes)
    return True


def _report(results: list[Result], *, as_json: bool) -> None:
    from stoker.doctor.examine import as_lines, worst

    if as_json:
        plain = {"level": worst(results), "checks": [result.as_plain() for result in results]}
        text = json.dumps(plain, indent=1, ensure_ascii=False)
        click.echo(text.encode("utf-8", "backslashreplace").decode())  # a path may hold what is no text
    else:
        click.echo("\n".join(as_lines(results)))
