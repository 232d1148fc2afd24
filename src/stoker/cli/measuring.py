"""What a command that measures shares with others of its kind: its surfaces, its progress, its end."""

from __future__ import annotations

import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from stoker.cli.values import given_path, json_option, size
from stoker.storage import named_errors

if TYPE_CHECKING:
    from stoker.bench.figures import Bench


def shown(measure: Callable[..., Bench | None]) -> Callable[..., None]:
    """A command that measures, with the surfaces that its figures go to."""

    @wraps(measure)
    def run(*, html: Path | None, as_json: bool, no_history: bool, **given: Any) -> None:
        with _terminable():
            found = measure(**given)
        if found is not None:  # rank 0's, where there are several
            _show(found, html=html, as_json=as_json, no_history=no_history)

    command: Callable[..., None] = json_option(run)
    command = click.option("--no-history", is_flag=True, help="Do not record it for `stoker history`.")(
        command
    )
    page = click.option("--html", type=given_path(dir_okay=False), metavar="FILE", help="Write a page.")
    return page(command)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM, as timeout and a scheduler send it, ends a measurement as Ctrl-C does: its files go."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = (
        signal.signal(signal.SIGTERM, end) if threading.current_thread() is threading.main_thread() else None
    )
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def seconds_option(default: float, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option(
        "--seconds", type=click.FloatRange(0.01, 600), default=default, show_default=True, help=help
    )


def size_option(default: str, help: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    return click.option("--size", type=size, default=default, show_default=True, metavar="BYTES", help=help)


def say(name: str, done: int, of: int) -> None:
    """Progress on stderr: a line that is overwritten on a terminal, nothing in a log of seconds."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{f'{done}/{of} ' if of else ''}{name}", err=True, nl=False)


def _show(found: Bench, *, html: Path | None, as_json: bool, no_history: bool) -> None:
    from stoker.bench.figures import as_lines

    if sys.stderr.isatty():
        click.echo("\r\x1b[K", err=True, nl=False)
    if not no_history:
        _record(found)  # first: what took minutes is not lost with a reader or a page
    click.echo(json.dumps(found.as_plain(), indent=1) if as_json else "\n".join(as_lines(found)))
    if html:
        from stoker.report.measured import measured_page

        with named_errors("write", html):
            html.write_text(measured_page(found), "utf-8")
    if not found.passed:
        raise click.exceptions.Exit(1)


def _record(found: Bench) -> None:
    """Into the history; that this failed is said, and is nobody's exit code."""
    from stoker.history.figures import HIGHER, LOWER, Figure
    from stoker.history.record import record

    better = {"more": HIGHER, "less": LOWER}
    units = {"share": "ratio", "count": ""}  # the history's words
    measured = [
        (one.name, one.value, units.get(one.unit, one.unit), better[one.better]) for one in found.figures
    ]
    figures = [Figure(name=name, value=value, unit=unit, better=way) for name, value, unit, way in measured]
    try:
        record("bench", f"bench {found.verb} {found.of}", figures)
    except Exception as error:
        click.echo(f"stoker: not recorded in the history: {type(error).__name__}: {error}", err=True)
