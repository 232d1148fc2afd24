"""Writes the pages of docs/reference that the code itself knows: `python docs/reference/make.py [--check]`.

cli.md comes from the commands' own help, api.md from signatures and docstrings, checks.md from the list of
checks, metrics.md from its table, remedies.md and gate.md from what tests hold doctor to.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import click
from python_names import names_page

from stoker.cli import stoker
from stoker.doctor.check import Result
from stoker.doctor.examine import CHECKS, examine
from stoker.doctor.need import Need
from stoker.machine.snapshot import read_snapshot
from stoker.report.dashboard import ALERTS
from stoker.report.metrics import METRICS

HERE = Path(__file__).parent
MACHINES = HERE.parents[1] / "tests" / "recordings" / "machines"
LARGE = Need(cpu_cores=96, memory_bytes=120 << 30, read_bytes_s=14_400_000_000)


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


def checks_page() -> str:
    """Each check with its reason, and what it says on a recorded machine that has the fault."""
    examples = {result.check.name: result for result in reversed(list(faults()))}
    parts = [
        "# Checks of `stoker doctor`\n\nGenerated from the list of checks by `docs/reference/make.py`; the "
        "examples are what the recorded machines in `tests/recordings/machines` get.\n"
    ]
    subject = ""
    for check in CHECKS:
        if check.subject != subject:
            subject = check.subject
            parts.append(f"\n## {subject[0].upper()}{subject[1:]}\n")
        parts.append(f"\n### {check.name}\n\n{check.why}\n")
        if check.name in examples:
            seen = examples[check.name].seen
            fixes = "\n".join(f"fix: {fix}" for fix in seen.fix)
            parts.append(f"\n```\n{seen.level}: {seen.read}\n{fixes}\n```\n")
    return "".join(parts)


def faults() -> Iterator[Result]:
    """What the recorded machines get, those without a need first."""
    for need in (Need(), LARGE):
        for path in sorted(MACHINES.glob("*.json")):
            yield from (one for one in examine(read_snapshot(path), need=need) if one.seen.fix)


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


def tested(name: str) -> Callable[[], str]:
    """A page that a table of the tests writes."""

    def page() -> str:
        sys.path.insert(0, str(MACHINES.parents[1] / "doctor"))
        return str(import_module(name).page())

    return page


PAGES = {
    HERE / "cli.md": commands_page,
    HERE / "api.md": names_page,
    HERE / "checks.md": checks_page,
    HERE / "metrics.md": metrics_page,
    HERE / "remedies.md": tested("remedies"),
    HERE / "gate.md": tested("gate_machines"),
}

if __name__ == "__main__":
    if "--check" in sys.argv:
        stale = [str(path) for path, make in PAGES.items() if path.read_text("utf-8") != make()]
        raise SystemExit(f"{', '.join(stale)} out of date: run {__file__}" if stale else 0)
    for path, make in PAGES.items():
        path.write_text(make(), "utf-8")
