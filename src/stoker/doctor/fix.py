"""Reversible fixes: read-ahead, scheduler, noatime, governor, persistence mode.

Disks and mounts are changed only under folders that the user named. Limits are not
among them: they hold for a process and its children, and whoever starts the job sets them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence

from stoker.doctor.check import Change, Result
from stoker.errors import StokerError

_PATIENCE_S = 30.0


def changes_of(results: Iterable[Result]) -> list[Change]:
    """What may be changed on this machine for what was seen, each once."""
    return list(dict.fromkeys(change for result in results for change in result.seen.changes))


def apply(changes: Sequence[Change]) -> None:
    """Make the changes one after another; stops at the first that fails and says how to go back."""
    for number, change in enumerate(changes):
        if trouble := _run(change.do):
            undo = "; ".join(done.undo for done in reversed(changes[:number]))
            raise StokerError(
                f"{change.do}: {trouble}",
                hint="run it as root on the machine itself"
                + (f"; to take back what was changed: {undo}" if undo else ""),
            )


def _run(line: str) -> str:
    """Empty, or what went wrong."""
    try:
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit code {done.returncode}"
