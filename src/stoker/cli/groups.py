"""Groups of commands: the nearest name for one that is misspelled, and groups with a usual command."""

from __future__ import annotations

import os
from difflib import get_close_matches
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


class Group(click.Group):
    """Commands under a name. One that does not exist gets the nearest that does."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            ctx.fail(f"there is no command {name!r}{did_you_mean(name, self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)


class DefaultToRun(Group):
    """`stoker prepare data/` means `stoker prepare run data/`, and its help has the options of `run`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            self._check_not_meant(ctx, args[0])
            args = ["run", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        run = self.commands["run"]
        own = click.Context(run, info_name="run", parent=ctx)
        options = [one for one in run.get_params(own) if isinstance(one, click.Option)]
        records = [record for one in options if (record := one.get_help_record(own))]
        with formatter.section("Options of `run`"):
            formatter.write_dl(records)
        self.format_commands(ctx, formatter)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        run = self.commands["run"]
        own = click.Context(run, info_name="run", parent=ctx, resilient_parsing=True)
        return [*super().shell_complete(ctx, incomplete), *run.shell_complete(own, incomplete)]

    def _check_not_meant(self, ctx: click.Context, name: str) -> None:
        """A word that is no file, and nearly a command, is that command misspelled."""
        near = did_you_mean(name, self.list_commands(ctx))
        if near and not name.startswith("-") and not os.path.lexists(name):
            ctx.fail(f"there is no file and no command {name!r}{near}")


def did_you_mean(name: str, known: list[str]) -> str:
    """The end of a sentence: empty where nothing is like it."""
    near = get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
