"""`stoker watch`: run any command and record what its training processes wait for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from stoker.cli.showing import METRICS_PORT, PAGE_PORT, Showing, afterwards, shown, verdict, with_stderr
from stoker.cli.values import Finite, given_path, port_option, price_option
from stoker.errors import UsageError
from stoker.formats.sizes import counted

if TYPE_CHECKING:
    from stoker.watch.command import Options
    from stoker.watch.sizes import BatchFlag


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--out", type=given_path(), help="Run folder.  [default: stoker-runs/TIME-NAME]")
@click.option(
    "--hz", type=float, default=1.0, show_default=True, help="Samples a second of machine and GPUs."
)
@click.option(
    "--gpu",
    default="nvml",
    show_default=True,
    metavar="nvml|none|URL|LOG",
    help="Where GPU samples come from: NVML, a dcgm exporter's URL, a saved `nvidia-smi dmon` log.",
)
@click.option("--pid", type=int, help="Observe a running process from outside instead of starting one.")
@click.option(
    "--what-if",
    type=click.Choice(["data", "batch"]),
    default=None,
    help="data: serve cached batches in every other window, to measure what a perfect loader would give. "
    "batch: run at half, double and the same batch size, to part fixed from proportional time.",
)
@click.option(
    "--batch-flag",
    metavar="FLAG",
    help="What COMMAND calls its batch size.  [default: --batch-size and its like]",
)
@click.option(
    "--window",
    type=Finite(min=0, min_open=True),
    default=20.0,
    show_default=True,
    help="Seconds of steps at each batch size; then the command is sent SIGTERM.",
)
@click.option(
    "--look",
    is_flag=False,
    flag_value="once",
    default=None,
    metavar="[STEPS]",
    help="A deep look: three steps under torch's profiler, once or every so many steps.",
)
@click.option(
    "--apply",
    "applied",
    type=given_path(exists=True, dir_okay=False),
    metavar="FILE",
    help="Run it with the settings that `stoker tune` found: tuned.json.",
)
@port_option(
    "--page", usual=PAGE_PORT, help="Serve the live page: to this machine, or on ADDRESS:PORT by token."
)
@port_option("--metrics", usual=METRICS_PORT, help="Serve metrics for Prometheus in the same way.")
@price_option
@click.option("--name", default="", help="What the run is called in the history.  [default: its command]")
@click.option("--no-history", is_flag=True, help="Do not record the run's figures for `stoker history`.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    out: Path | None,
    hz: float,
    gpu: str,
    pid: int | None,
    what_if: str | None,
    batch_flag: str | None,
    window: float,
    look: str | None,
    applied: Path | None,
    page: str | None,
    metrics: str | None,
    price: float | None,
    name: str,
    no_history: bool,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and record what its GPUs wait for.

    \b
    stoker watch -- torchrun train.py

    Nothing in the program changes: same output, same exit code, signals are passed on.
    """
    from stoker.watch.command import Options, name_of, watch
    from stoker.watch.sizes import find_flag

    with_stderr()

    if bool(command) == (pid is not None):
        raise UsageError("give either a command or --pid", hint="stoker watch -- python train.py")
    if batch_flag and what_if != "batch":
        raise UsageError(
            "--batch-flag says nothing without --what-if batch", hint="add it, or leave both out"
        )
    if what_if == "batch" and pid is not None:
        raise UsageError("--what-if batch starts a command several times", hint="give a command, not --pid")
    if look is not None and look != "once" and not (look.isdigit() and int(look) >= 10):
        raise UsageError(f"--look {look}", hint="give it alone, or a number of steps from 10 on")
    if look is not None and pid is not None:
        raise UsageError("--look needs hooks in the program", hint="give a command, not --pid")
    if applied is not None and pid is not None:
        raise UsageError("--apply sets what a program builds", hint="give a command, not --pid")
    flag = find_flag(command, name=batch_flag) if what_if == "batch" else None
    folder = out or _new_folder(Path(name_of(command)).stem if command else f"pid-{pid}")
    options = Options(
        folder=folder,
        hz=hz,
        gpu=gpu,
        what_if="data" if what_if == "data" else "",
        look=look or "",
        apply=applied,
    )
    showing = Showing(page=page, metrics=metrics, price=price)
    if flag:
        context.exit(_what_if_batch(flag, options, showing, window_s=window))
    with shown(folder, showing):
        if pid is not None:
            from stoker.watch.outside import watch_pid

            code = watch_pid(pid, options)
        else:
            code = watch(command, options)
    with afterwards():
        verdict(folder, showing)
        if what_if == "data":
            _say_ceiling(folder)
        elif not no_history:
            _record(folder, name)
    context.exit(code)


def _record(folder: Path, name: str) -> None:
    """Into the history; that this failed is said, and is nobody's exit code."""
    from stoker.history.record import record_run

    try:
        store = record_run(folder, title=name)
    except Exception as error:
        click.echo(f"stoker: not recorded in the history: {type(error).__name__}: {error}", err=True)
        return
    if store:
        click.echo(f"history {store}", err=True)


def _what_if_batch(flag: BatchFlag, options: Options, showing: Showing, *, window_s: float) -> int:
    """Run every size and say what they show: on stderr, because stdout is the program's."""
    from stoker.report.whatif import whatif_lines, write_whatif
    from stoker.watch.whatif import watch_sizes

    found = watch_sizes(flag, options, window_s=window_s, shown=lambda folder: shown(folder, showing))
    with afterwards():
        click.echo("\n".join(["", *whatif_lines(found)]), err=True)
        page = options.folder / "whatif.html"
        write_whatif(found, page)
        click.echo(f"\nruns    {options.folder}\nplot    {page}", err=True)
    return found.code


def _say_ceiling(folder: Path) -> None:
    """What serving cached batches has measured: on stderr, because stdout is the program's."""
    from stoker.watch import runs
    from stoker.watch.runs.ceiling import ceiling

    found = ceiling(runs.read_recording(folder))
    if found is None:
        click.echo("what if: the run was too short for a window of real and one of cached batches", err=True)
        return
    click.echo(
        f"what if: a step takes {1e3 * found.real_step_s:.1f} ms, with cached batches"
        f" {1e3 * found.cached_step_s:.1f} ms: a perfect loader would make it"
        f" {found.speedup:.2f} times as fast ({found.real_steps} and {counted(found.cached_steps, 'step')}"
        " measured)",
        err=True,
    )


def _new_folder(name: str) -> Path:
    """stoker-runs/20261115-093000-train, and one further on where that is taken."""
    base = Path("stoker-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except FileExistsError:
            continue
        return folder
    raise UsageError(f"{base} and 998 more exist", hint="give --out")
