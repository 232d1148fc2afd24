"""The command line as a user meets it: help, wrong usage, versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click
import pytest

import stoker as package
from stoker.cli import stoker
from stoker.cli.values import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATH_ORDER = [
    "prepare", "stage", "load", "feed", "order", "checkpoint", "watch", "diagnose", "report", "metrics",
    "doctor", "bench", "tune", "history", "plan", "deploy",
]  # fmt: skip


def commands(command: click.Command = stoker, name: str = "stoker") -> Iterator[tuple[str, click.Command]]:
    """Every command with its full name."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for verb in command.list_commands(context):
            child = command.get_command(context, verb)
            assert child is not None
            yield from commands(child, f"{name} {verb}")


def options() -> list[Any]:
    return [
        pytest.param(parameter, id=f"{name} {parameter.opts[-1]}")
        for name, command in commands()
        for parameter in command.params
        if isinstance(parameter, click.Option)
    ]


@pytest.mark.parametrize("option", options())
def test_every_option_has_help(option: click.Option) -> None:
    assert option.help


@pytest.mark.parametrize("command", [pytest.param(command, id=name) for name, command in commands()])
def test_every_command_has_help(command: click.Command) -> None:
    assert command.help


@pytest.mark.parametrize(
    "group",
    [pytest.param(command, id=name) for name, command in commands() if isinstance(command, click.Group)],
)
def test_what_a_command_does_fits_in_its_line_of_the_list(group: click.Group) -> None:
    shown = group.get_help(click.Context(group, info_name="stoker", terminal_width=80))
    listed = shown.partition("Commands:\n")[2].splitlines()
    assert listed
    assert [line for line in listed if line.endswith("...")] == []


def test_help_lists_the_verbs_in_the_order_of_the_path() -> None:
    verbs = stoker.list_commands(click.Context(stoker))
    assert verbs == [verb for verb in PATH_ORDER if verb in verbs]


def test_version_prints_the_version_alone(run_stoker: Callable[..., Any]) -> None:
    assert run_stoker("--version").stdout == f"{package.__version__}\n"


def test_prepare_with_sources_is_short_for_prepare_run(run_stoker: Callable[..., Any]) -> None:
    assert run_stoker("prepare", "x.jsonl").stderr == run_stoker("prepare", "run", "x.jsonl").stderr


WRONG = [
    ["nonsense"],
    ["--nonsense"],
    ["prepare", "run"],
    ["prepare", "data", "--out", "x"],
    ["prepare", "data", "--tokenizer", "x"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--format", "zip"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--shard-size", "many"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--epochs", "0"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--epochs", "2", "--no-shuffle"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--min-chars", "9", "--max-chars", "3"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--near-dedup", "1.5"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--max-document-size", "0"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--max-document-size", "5GiB"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--workers", "-1"],
    ["prepare", "data", "--out", "x", "--tokenizer", "y", "--work", "s3://bucket/scratch"],
    ["prepare", "verify"],
]


@pytest.mark.parametrize("arguments", WRONG, ids=[" ".join(arguments) for arguments in WRONG])
def test_wrong_usage_says_error_and_hint_and_exits_with_two(
    arguments: list[str], run_stoker: Callable[..., Any]
) -> None:
    ran = run_stoker(*arguments)
    lines = ran.stderr.splitlines()
    assert (ran.rc, ran.stdout, lines[0][:7], lines[-1][:6]) == (2, "", "error: ", "hint: ")


def test_no_arguments_print_the_help(run_stoker: Callable[..., Any]) -> None:
    ran = run_stoker()
    assert (ran.rc, ran.stderr[:6]) == (2, "Usage:")


def test_no_arguments_to_a_verb_print_its_help(run_stoker: Callable[..., Any]) -> None:
    ran = run_stoker("prepare")
    assert (ran.rc, ran.stderr[:6]) == (2, "Usage:")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("1", 1),
        ("1KB", 1000),
        ("1KiB", 1024),
        ("512MiB", 512 << 20),
        ("1.5GB", 1_500_000_000),
        ("2t", 2 * 10**12),
    ],
)
def test_a_size_is_read_as_people_write_it(text: str, wanted: int) -> None:
    assert size(text) == wanted


@pytest.mark.parametrize("text", ["", "x", "-1", "1iB", "1 QB", "1.2.3MB"])
def test_a_wrong_size_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        size(text)
