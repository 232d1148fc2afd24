"""HTML report: one file that opens anywhere, offline, printed, and without scripts."""

from __future__ import annotations

import os
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from importlib.resources import files
from pathlib import Path

from stoker.report.page.markup import Html, join, tag
from stoker.report.page.sections import sections
from stoker.report.summary import Summary
from stoker.storage import new_file


def write_report(summary: Summary, path: Path) -> None:
    """Write the report of a run, for its owner alone; the file appears whole or not at all."""
    with new_file(path) as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(report(summary).encode())


def report(summary: Summary) -> str:
    """The page of a run that is over, or as it is at this moment."""
    return _page(summary, live=False)


def live_page(summary: Summary) -> str:
    """The same page; it asks its server every second for sections that changed."""
    return _page(summary, live=True)


def static_page(title: str, parts: Mapping[str, Html]) -> str:
    """A page in the report's design, of sections by their ids, without a script."""
    body = tag("body", tag("main", *(tag("section", html, id=name) for name, html in parts.items())))
    return _framed(title, body, script="")


def _page(summary: Summary, *, live: bool) -> str:
    script = _part("page.js")
    body = tag(
        "body",
        tag("main", *(tag("section", html, id=name) for name, html in sections(summary).items())),
        tag("p", Html(), id="connection", role="status"),
        tag("script", script),
        data_live="1" if live else None,
    )
    return _framed(summary.title, body, script=script)


def _framed(title: str, body: Html, *, script: str) -> str:
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">'),
        Html('<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'),
        tag("title", f"{title} · stoker"),
        tag("style", _part("page.css")),
    )
    return join(Html("<!doctype html>\n"), tag("html", head, body, lang="en"))


def _policy(script: str) -> str:
    """Only our own script runs: should text of a run ever get past the escaping, it stays inert."""
    digest = b64encode(sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "connect-src 'self'; img-src data:"
    )


def _part(name: str) -> Html:
    return Html((files("stoker.report.page") / name).read_text("utf-8"))
