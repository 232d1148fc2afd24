"""Prometheus metrics of a machine's health: what `stoker doctor --metrics` serves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.doctor.check import LEVELS, Result
from stoker.formats.prometheus import head, sample

_NAME = "stoker_machine_check"
_HELP = "What a check of the machine says: 0 ok, 1 unknown, 2 warn, 3 fail."


def expose(results: Iterable[Result], *, node: str) -> str:
    """In Prometheus' text format; a check that sees several things counts by the worst."""
    worst: dict[tuple[str, str], int] = {}
    for result in results:
        key = (result.check.subject, result.check.name)
        worst[key] = max(worst.get(key, 0), LEVELS.index(result.level))
    lines = [
        sample(_NAME, (("node", node), ("subject", subject), ("check", name)), level)
        for (subject, name), level in worst.items()
    ]
    return head(_NAME, kind="gauge", help=_HELP) + "".join(lines)
