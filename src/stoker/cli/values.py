"""Options that several verbs share, and their values: sizes with units, paths that must exist."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from stoker.errors import UsageError
from stoker.formats.sizes import parse_size
from stoker.storage import is_local, local_path

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")


class Finite(click.FloatRange):
    """A number: NaN is in every range, since nothing is smaller or larger than it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is no number.", param, ctx)
        return number


price_option = click.option(
    "--price", type=Finite(min=0), metavar="DOLLARS", help="What an hour of one GPU costs."
)


def choice(*names: str, among: Sequence[str], help: str) -> Callable[[Command], Command]:
    """One of a few words, the first of them unless another is given."""
    return click.option(*names, type=click.Choice(among), default=among[0], show_default=True, help=help)


def port_option(name: str, *, usual: str, help: str) -> Callable[[Command], Command]:
    """Alone it means the usual port; with a value that port, or ADDRESS:PORT."""
    said = f"{help}  [default port: {usual}]"
    return click.option(name, metavar="[PORT]", is_flag=False, flag_value=usual, help=said)


class _GivenPath(click.Path):
    """Path("") is this folder, which nobody means who writes --cache "$CACHE" where CACHE is not set."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "":
            self.fail("it is empty: a variable in the command may not be set", param, ctx)
        return super().convert(value, param, ctx)


def given_path(**checks: bool) -> click.Path:
    """A path that was given; `exists`, `dir_okay` and `file_okay` as click has them."""
    return _GivenPath(path_type=Path, **checks)


def size(text: str) -> int:
    """Bytes as people write them: 512MiB, 1.5GB, 67108864."""
    try:
        return parse_size(text)
    except UsageError as error:
        raise click.BadParameter(f"{error.message}; {error.hint}") from error


def existing(text: str) -> str:
    """A URL, or a path at which there is something."""
    if is_local(text) and not local_path(text).exists():
        raise click.BadParameter(f"{text} does not exist")
    return text
