"""`stoker watch`: run any command and record what its training processes wait for."""

from __future__ import annotations

import time
from pathlib import Path

import click

from stoker.cli.showing import METRICS_PORT, PAGE_PORT, Showing, shown, verdict
from stoker.errors import UsageError


@click.command(context_settings={"ignore_unknown_options": False})
@click.option("--out", type=click.Path(path_type=Path), help="Run folder.  [default: stoker-runs/TIME-NAME]")
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
    type=click.Choice(["data"]),
    default=None,
    help="Serve cached batches in every other window, to measure what a perfect loader would give.",
)
@click.option(
    "--page",
    metavar="[PORT]",
    is_flag=False,
    flag_value=PAGE_PORT,
    help=f"Serve the live page: to this machine, or on ADDRESS:PORT by token.  [default port: {PAGE_PORT}]",
)
@click.option(
    "--metrics",
    metavar="[PORT]",
    is_flag=False,
    flag_value=METRICS_PORT,
    help=f"Serve metrics for Prometheus in the same way.  [default port: {METRICS_PORT}]",
)
@click.option("--price", type=float, metavar="DOLLARS", help="What an hour of one GPU costs.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def command(
    context: click.Context,
    out: Path | None,
    hz: float,
    gpu: str,
    pid: int | None,
    what_if: str | None,
    page: str | None,
    metrics: str | None,
    price: float | None,
    command: tuple[str, ...],
) -> None:
    """Run COMMAND and record what its GPUs wait for: `stoker watch -- torchrun train.py`.

    Nothing in the program changes: same output, same exit code, signals are passed on.
    """
    from stoker.observe.watch import Options, name_of, watch

    if bool(command) == (pid is not None):
        raise UsageError("give either a command or --pid", hint="stoker watch -- python train.py")
    folder = out or _new_folder(Path(name_of(command)).stem if command else f"pid-{pid}")
    options = Options(folder=folder, hz=hz, gpu=gpu, what_if=what_if or "")
    showing = Showing(page=page, metrics=metrics, price=price)
    with shown(folder, showing):
        if pid is not None:
            from stoker.observe.outside import watch_pid

            code = watch_pid(pid, options)
        else:
            code = watch(command, options)
    verdict(folder, showing)
    context.exit(code)


def _new_folder(name: str) -> Path:
    """stoker-runs/20261115-093000-train, and one further on where that is taken."""
    base = Path("stoker-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for number in range(1, 1000):
        folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise UsageError(f"{base} and 998 more exist", hint="give --out")
