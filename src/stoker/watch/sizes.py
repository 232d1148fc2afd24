"""Batch-size sweep plan: the flag in the command, the sizes `--what-if batch` tries, the order of visits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.errors import UsageError

# As frameworks spell it, with - or _ between the words.
NAMES = ("--batch-size", "--per-device-train-batch-size", "--micro-batch-size", "--bs")


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchFlag:
    """Where in a command its batch size stands: the number is all of the word after `prefix`."""

    name: str
    command: tuple[str, ...]
    at: int
    prefix: str  # "" or "--batch-size="
    batch: int

    def command_with(self, batch: int) -> tuple[str, ...]:
        return (*self.command[: self.at], f"{self.prefix}{batch}", *self.command[self.at + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Visit:
    """One run of the command at one size."""

    batch: int
    folder: str
    window_s: float


def find_flag(command: Sequence[str], *, name: str | None = None) -> BatchFlag:
    """The flag called `name`, or the one flag that is called as batch sizes are."""
    wanted = (name,) if name else NAMES
    found = [at for at, word in enumerate(command) if _name(word, exact=bool(name)) in wanted]
    spelled = {command[at].partition("=")[0] for at in found}
    if not found:
        raise UsageError(
            f"the command has no {name}" if name else f"the command has none of {', '.join(NAMES)}",
            hint="write the batch size into the command, and name its flag with --batch-flag",
        )
    if len(spelled) > 1:
        raise UsageError(
            f"the command has {' and '.join(sorted(spelled))}", hint="choose one with --batch-flag"
        )
    return _flag(tuple(command), found[-1])  # the last one counts, as in most parsers


def visits(batch: int, *, window_s: float) -> list[Visit]:
    """Half, double, given, double, half: on average each size is in the middle, so a machine that grows
    steadily slower or faster favours none. The size given has one whole window, the others two halves."""
    order = ((batch // 2, 0.5), (batch * 2, 0.5), (batch, 1.0), (batch * 2, 0.5), (batch // 2, 0.5))
    return [
        Visit(batch=size, folder=f"{number}-batch-{size}", window_s=window_s * part)
        for number, (size, part) in enumerate(order, 1)
    ]


def _name(word: str, *, exact: bool) -> str:
    name = word.partition("=")[0]
    return name if exact else name.replace("_", "-")


def _flag(command: tuple[str, ...], at: int) -> BatchFlag:
    name, equals, value = command[at].partition("=")
    if not equals:
        at += 1
        value = command[at] if at < len(command) else ""
    if not re.fullmatch(r"[0-9]+", value) or int(value) < 2 or int(value) % 2:
        raise UsageError(
            f"{name} is {value or 'not given a value'}: half of it is no batch size",
            hint="give it an even number of 2 or more",
        )
    return BatchFlag(
        name=name, command=command, at=at, prefix=name + equals if equals else "", batch=int(value)
    )
