"""A machine's state of health for Prometheus: what `stoker doctor --metrics` serves. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from stoker.doctor.check import LEVELS, Result

_HEAD = """\
# HELP stoker_machine_check What a check of the machine says: 0 ok, 1 unknown, 2 warn, 3 fail.
# TYPE stoker_machine_check gauge
"""


def expose(results: Iterable[Result], *, node: str) -> str:
    """In Prometheus' text format; a check that sees several things counts by the worst."""
    worst: dict[tuple[str, str], int] = {}
    for result in results:
        key = (result.check.subject, result.check.name)
        worst[key] = max(worst.get(key, 0), LEVELS.index(result.level))
    lines = [
        f'stoker_machine_check{{node="{_quoted(node)}",subject="{subject}",check="{name}"}} {level}\n'
        for (subject, name), level in worst.items()
    ]
    return _HEAD + "".join(lines)


def _quoted(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
