"""Goodput for people: the accounts of a job, and a line for each restart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.formats.sizes import counted
from stoker.history.goodput.account import ACCOUNTS, Account
from stoker.history.goodput.attempts import Attempt
from stoker.report.units import percent, seconds

_WORDS = {
    "productive": "steps that were kept",
    "startup": "from a start to the first step, without loading",
    "restore": "loading a checkpoint",
    "repeated": "work lost with a restart and done again",
    "starved": "waiting for data",
    "saving": "held up by saves",
    "stalled": "standing for no reason that is seen",
    "ending": "after the last step",
    "down": "between runs: queued, or nobody had noticed",
    "unseen": "recorded and overwritten since",
}


def name_of(attempts: Sequence[Attempt]) -> str:
    """What a job is called: its id, else its checkpoint folder, else its first run."""
    ids = [one.job for one in attempts if one.job]
    folders = [name for one in attempts for name in one.checkpoints]
    return next(iter([*ids, *folders]), Path(attempts[0].run).name)


def goodput_lines(attempts: Sequence[Attempt], found: Account) -> list[str]:
    lines = [
        f"{name_of(attempts)}: goodput {percent(found.share('productive'))} of {seconds(found.wall_s)}, "
        f"{counted(len(attempts), 'run')}, {counted(len(found.restarts), 'restart')}, "
        f"{counted(found.steps, 'step')}",
        "",
    ]
    for name in ACCOUNTS:
        if found.seconds[name] > 0:
            share = percent(found.share(name))
            lines.append(f"  {name:11} {seconds(found.seconds[name]):>13} {share:>6}  {_WORDS[name]}")
    for number, one in enumerate(found.restarts, 1):
        lines += [
            "",
            f"restart {number}: cost {seconds(one.cost_s)}, after {one.ended or 'an end nobody saw'}",
            f"  repeated {seconds(one.repeated_s)}, down {seconds(one.down_s)}, start-up "
            f"{seconds(one.startup_s)}, restore {seconds(one.restore_s)}",
            f"  resumed from {one.resumed}",
        ]
    return lines
