"""Writes the pages of docs/reference that the code itself knows: `python docs/reference/make.py [--check]`.

cli.md comes from the commands' own help, metrics.md from the table of metrics.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stoker.cli import stoker
from stoker.report.dashboard import ALERTS
from stoker.report.metrics import METRICS

FOLDER = Path(__file__).parent


def commands_page() -> str:
    parts = ["# Commands\n\nGenerated from `--help` by `docs/reference/make.py`.\n"]
    for name, command, context in commands("stoker", stoker, None):
        parts.append(f"\n## {name}\n\n```\n{command.get_help(context)}\n```\n")
    return "".join(parts)


def commands(name: str, command: click.Command, parent: click.Context | None):
    context = click.Context(command, info_name=name.split()[-1], parent=parent, max_content_width=100)
    context.terminal_width = 100
    yield name, command, context
    if isinstance(command, click.Group):
        for child in command.list_commands(context):
            found = command.get_command(context, child)
            if found is not None and not found.hidden:
                yield from commands(f"{name} {child}", found, context)


def metrics_page() -> str:
    parts = ["# Metrics\n\nGenerated from `stoker/report/metrics.py` by `docs/reference/make.py`.\n"]
    parts.append("Every series also has the label `job`, the run's title.\n")
    for row in dict.fromkeys(metric.row for metric in METRICS):
        parts.append(f"\n## {row}\n\n| metric | kind | labels | meaning |\n|---|---|---|---|\n")
        for metric in METRICS:
            if metric.row == row:
                labels = " ".join(f"`{label}`" for label in metric.labels)
                parts.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |\n")
    parts.append("\n## Alerts\n\n| alert | severity | fires when, and for how long |\n|---|---|---|\n")
    for alert in ALERTS:
        expr = alert.expr.replace("|", "\\|")
        parts.append(f"| `{alert.name}` | {alert.severity} | `{expr}` for {alert.hold} |\n")
    return "".join(parts)


PAGES = {"cli.md": commands_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    if "--check" in sys.argv:
        old = [name for name, make in PAGES.items() if (FOLDER / name).read_text("utf-8") != make()]
        raise SystemExit(f"out of date: {', '.join(old)}: run {__file__}" if old else 0)
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), "utf-8")
