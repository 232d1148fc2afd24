"""Check list: all checks, in the order of a report; and a machine examined by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.doctor import (
    cards,
    cpu,
    environment,
    fabric,
    gpu,
    links,
    memory,
    shared,
    storage,
    surroundings,
    tried,
    upkeep,
)
from stoker.doctor.check import LEVELS, Check, Level, Result, look
from stoker.doctor.need import Need
from stoker.machine.plain import NOT_READ
from stoker.machine.snapshot import Snapshot

CHECKS: tuple[Check, ...] = (
    *memory.CHECKS,
    *upkeep.MEMORY,
    *cpu.CHECKS,
    *upkeep.CPU,
    *storage.CHECKS,
    *upkeep.STORAGE,
    *shared.CHECKS,
    *gpu.CHECKS,
    *cards.CHECKS,
    *links.CHECKS,
    *fabric.CHECKS,
    *environment.CHECKS,
    *upkeep.SURROUNDINGS,
    *surroundings.CHECKS,
    *tried.CHECKS,
)


def examine(snapshot: Snapshot, *, need: Need | None = None) -> list[Result]:
    """What every check sees on a recorded machine. Pure: the same machine gives the same results."""
    checks = [check for check in CHECKS if check not in tried.CHECKS or snapshot.trials != NOT_READ]
    return [result for check in checks for result in look(check, snapshot, need or Need())]


def worst(results: Iterable[Result]) -> Level:
    """The level of the whole machine."""
    return max((result.level for result in results), key=LEVELS.index, default="ok")


def as_lines(results: Sequence[Result]) -> list[str]:
    """The report, readable without colour: by subject; what is wrong with why, and a line for each fix."""
    lines: list[str] = []
    width = max((len(result.check.name) for result in results), default=0)
    subject = ""
    for result in results:
        if result.check.subject != subject:
            subject = result.check.subject
            lines += ["", subject]
        lines.append(f"  {result.level:7} {result.check.name:{width}}  {shown(result.seen.read)}")
        if result.level in ("warn", "fail"):
            lines.append(f"          why: {result.check.why}")
        lines += [f"          fix: {shown(fix)}" for fix in result.seen.fix]
    return [*lines[1:], "", _sum(results)]


def shown(text: str) -> str:
    """Fit for a terminal: names of mounts, variables and the kernel's log are other people's text, and may
    hold line breaks, colours, or what turns a line around."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text)


def _sum(results: Sequence[Result]) -> str:
    counts = {level: sum(result.level == level for result in results) for level in LEVELS}
    return ", ".join(f"{counts[level]} {level}" for level in ("fail", "warn", "unknown", "ok"))
