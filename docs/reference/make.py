"""Writes docs/reference/cli.md from the commands' own help: `python docs/reference/make.py [--check]`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from stoker.cli import stoker

PAGE = Path(__file__).parent / "cli.md"


def page() -> str:
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


if __name__ == "__main__":
    if "--check" in sys.argv:
        raise SystemExit(0 if PAGE.read_text("utf-8") == page() else f"{PAGE} is out of date: run {__file__}")
    PAGE.write_text(page(), "utf-8")
