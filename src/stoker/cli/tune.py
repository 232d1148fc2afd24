"""`stoker tune`: better settings for a job by short trials of it, with the proof and the diff."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.cli.showing import with_stderr
from stoker.cli.values import Finite, given_path, json_option
from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.tune.result import Tuned


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--out", type=given_path(), help="Folder of the trials.  [default: stoker-runs/TIME-tune-NAME]")
@click.option(
    "--minutes",
    type=Finite(min=0.1),
    default=3.0,
    show_default=True,
    help="What all trials may take together.",
)
@click.option(
    "--allow-numerics",
    is_flag=True,
    help="Also try what changes results: TF32, torch.compile, channels-last, fused optimizers.",
)
@click.option("--write", is_flag=True, help="Apply the diff to the file, if it is still as it was.")
@click.option(
    "--env", "variables", multiple=True, metavar="NAME=VALUE", help="Set for trials alone; may be repeated."
)
@click.option(
    "--overwrite", is_flag=True, help="Let trials overwrite and delete files that lay there before."
)
@click.option("--no-history", is_flag=True, help="Do not record it for `stoker history`.")
@json_option
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def command(
    out: Path | None,
    minutes: float,
    allow_numerics: bool,
    write: bool,
    variables: tuple[str, ...],
    overwrite: bool,
    no_history: bool,
    as_json: bool,
    command: tuple[str, ...],
) -> None:
    """Find better settings for COMMAND by short trials of it.

    \b
    stoker tune -- python train.py

    The program is run some ten times for a few seconds each, in this folder and with its own arguments, and
    ended (SIGTERM) after the steps that are measured. It writes what it writes in these steps, but may not
    overwrite nor delete files that lay there before. Nothing in it changes unless --write is given.
    """
    from stoker.tune.run import Options, tune

    with_stderr()
    if not command:
        raise UsageError("no command to tune", hint="stoker tune -- python train.py")
    folder = out or _new_folder(command)
    options = Options(
        folder=folder,
        minutes=minutes,
        numerics=allow_numerics,
        overwrite=overwrite,
        environ=dict(_variable(one) for one in variables),
    )
    found = tune(command, options, said=lambda line: click.echo(f"tune: {line}", err=True))
    if not no_history:
        _record(found)
    _show(found, as_json=as_json)
    if write and found.better:
        _write(found)


def _show(found: Tuned, *, as_json: bool) -> None:
    from stoker.tune.result import as_lines

    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=1))
        return
    click.echo("\n".join(as_lines(found)))
    if found.better:
        settings = found.folder / "tuned.json"
        click.echo(
            f"\nwithout an edit: stoker watch --apply {settings} -- …, or stoker.apply({str(settings)!r})"
        )


def _write(found: Tuned) -> None:
    if found.edit is None:
        raise UsageError(
            "the call that builds the loader cannot be changed safely", hint="set it by hand, as said above"
        )
    found.edit.write()
    click.echo(f"changed {found.edit.path}", err=True)


def _record(found: Tuned) -> None:
    """Into the history; that this failed is said, and is nobody's exit code."""
    from stoker.history.figures import HIGHER, LOWER, Figure
    from stoker.history.record import record
    from stoker.watch.command import name_of

    gain = found.outcome.gain if found.better else None
    figures = [Figure(name="step", value=found.plain_s / max(1, found.steps), unit="s", better=LOWER)]
    if gain:
        figures.append(
            Figure(name="gain", value=gain.times, unit="ratio", better=HIGHER, low=gain.low, high=gain.high)
        )
    try:
        facts = {"knobs": dict(found.outcome.best), "losses": found.outcome.losses}
        record("tune", f"tune {name_of(found.command)}", figures, command=found.command, facts=facts)
    except Exception as error:
        click.echo(f"stoker: not recorded in the history: {type(error).__name__}: {error}", err=True)


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text}: write NAME=VALUE")
    return name, value


def _new_folder(command: tuple[str, ...]) -> Path:
    from stoker.watch.command import name_of

    return Path("stoker-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-tune-{Path(name_of(command)).stem}"
