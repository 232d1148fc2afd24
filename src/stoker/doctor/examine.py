"""All checks, in the order of a report; and a machine examined by them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stoker.doctor import cpu, environment, gpu, memory, shared, storage, surroundings
from stoker.doctor.check import LEVELS, Check, Level, Result, look
from stoker.doctor.need import Need
from stoker.machine.snapshot import Snapshot

CHECKS: tuple[Check, ...] = (
    *memory.CHECKS,
    *cpu.CHECKS,
    *storage.CHECKS,
    *shared.CHECKS,
    *gpu.CHECKS,
    *environment.CHECKS,
    *surroundings.CHECKS,
)


def examine(snapshot: Snapshot, *, need: Need | None = None) -> list[Result]:
    """What every check sees on a recorded machine. Pure: the same machine gives the same results."""
    return [result for check in CHECKS for result in look(check, snapshot, need or Need())]


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
        lines.append(f"  {result.level:7} {result.check.name:{width}}  {result.seen.read}")
        if result.level in ("warn", "fail"):
            lines.append(f"          why: {result.check.why}")
        lines += [f"          fix: {fix}" for fix in result.seen.fix]
    return [*lines[1:], "", _sum(results)]


def _sum(results: Sequence[Result]) -> str:
    counts = {level: sum(result.level == level for result in results) for level in LEVELS}
    return ", ".join(f"{counts[level]} {level}" for level in ("fail", "warn", "unknown", "ok"))
