"""What `stoker watch` shows: the run on the surfaces asked for, the verdict at its end."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from stoker.diagnose.rules import Verdict
    from stoker.report.summary import Summary

PAGE_PORT, METRICS_PORT = "8750", "9750"
LOG_EVERY_S = 10.0  # how often a run is looked at for a log alone: often enough to name a hang while it lasts


@dataclass(frozen=True, kw_only=True, slots=True)
class Showing:
    """How a run is shown; addresses are as written on the command line."""

    page: str | None = None
    metrics: str | None = None
    price: float | None = None  # dollars for an hour of one GPU


@contextmanager
def shown(folder: Path, showing: Showing) -> Iterator[None]:
    """Show the run in `folder` on stderr, and where else it was asked for, while the block lasts."""
    from stoker.report.live import EVERY_S, Live
    from stoker.report.panel import panel_for
    from stoker.report.serve import Address
    from stoker.watch.runs.files import node_name

    page, metrics = (Address.parse(text) if text else None for text in (showing.page, showing.metrics))
    somebody_looks = page or metrics or sys.stderr.isatty()
    with Live(
        lambda: look(folder, showing),
        surface=panel_for(sys.stderr),
        page=page,
        metrics=metrics,
        node=node_name(),
        every_s=EVERY_S if somebody_looks else LOG_EVERY_S,
    ) as live:
        for what, url in (("page", live.page_url), ("metrics", live.metrics_url)):
            if url:
                click.echo(f"stoker: {what} at {url}", err=True)
        yield


def verdict(folder: Path, showing: Showing) -> None:
    """Say what the run shows, on stderr because stdout is the program's; leave its report in the folder."""
    from stoker.report.card import show_card
    from stoker.report.html import write_report

    report = folder / "report.html"
    try:
        summary, found = _judged(folder, showing)
        write_report(summary, report)
    except Exception as error:  # no fault of ours may become the program's exit code
        click.echo(f"stoker: no verdict: {type(error).__name__}: {error}\nrun     {folder}", err=True)
        return
    click.echo("", err=True)
    show_card(summary, sys.stderr)
    if not found.findings:
        doubts = [one.why for one in found.abstained if one.kind == "healthy"]
        click.echo("\n".join(["", "why not", *(f"  - healthy: {why}" for why in doubts)]), err=True)
    click.echo(f"\nrun     {folder}\nreport  {report}", err=True)


@contextmanager
def afterwards() -> Iterator[None]:
    """What is said when the program has ended: that a log is full, that nobody reads it any more, that
    somebody will not wait for it, or a fault of ours, none of it may become the program's exit code."""
    try:
        yield
    except OSError:
        _say_no_more()
    except KeyboardInterrupt:
        pass
    except Exception as error:
        with suppress(OSError):
            click.echo(f"stoker: {type(error).__name__}: {error}", err=True)


def _say_no_more() -> None:
    """Python would try once more at its end to write what is left, and exit with 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


def with_stderr() -> None:
    """A service may have closed it."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # for as long as this process lives


def serve_until_stopped(run: Path, showing: Showing) -> None:
    """Serve the page of a run that somebody else watches, or that is over."""
    from stoker.report.live import Live
    from stoker.report.serve import Address

    with (
        Live(lambda: look(run, showing), page=Address.parse(showing.page or PAGE_PORT)) as live,
        suppress(KeyboardInterrupt),
    ):
        click.echo(f"page at {live.page_url}; Ctrl-C ends it")
        threading.Event().wait()


def look(run: Path, showing: Showing) -> Summary:
    """The run as it is now."""
    return _judged(run, showing)[0]


def _judged(run: Path, showing: Showing) -> tuple[Summary, Verdict]:
    from stoker.diagnose.rules import diagnose
    from stoker.report.summary import summarise
    from stoker.watch.runs import read_recording

    recording = read_recording(run)
    found = diagnose(recording)
    return summarise(recording, found.findings, price=showing.price), found
