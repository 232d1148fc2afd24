"""`stoker report`: a run as a page, written to a file or served while it goes on."""

from __future__ import annotations

from pathlib import Path

import click

from stoker.cli.showing import PAGE_PORT
from stoker.cli.values import given_path, port_option, price_option


@click.command()
@click.argument("run", metavar="RUN", type=given_path(exists=True))
@click.option("--out", type=given_path(dir_okay=False), help="File to write.  [default: RUN.html]")
@price_option
@port_option("--page", usual=PAGE_PORT, help="Serve it until Ctrl-C instead, renewed while the run lasts.")
def command(run: Path, out: Path | None, price: float | None, page: str | None) -> None:
    """Show RUN as one HTML page that opens offline.

    RUN is a folder written by `stoker watch`, also while it is being written, or a flat recording.
    """
    from stoker.cli.showing import Showing, look, serve_until_stopped
    from stoker.report.html import write_report

    showing = Showing(page=page, price=price)
    if page:
        serve_until_stopped(run, showing)
        return
    path = out or page_beside(run)
    write_report(look(run, showing), path)
    click.echo(path)


def page_beside(run: Path) -> Path:
    """RUN.html: a folder's whole name, since lr0.1 and lr0.2 are two runs; that of `.` is where it leads."""
    if not run.is_dir():
        return run.with_suffix(".html")
    named = run if run.name.strip(".") else run.resolve()
    return named.with_name(f"{named.name}.html")
