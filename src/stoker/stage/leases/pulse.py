"""Heartbeat by a process of its own: it goes on while a lease's holder is stopped, or keeps Python's lock.

    pulse = Pulse(record, beat_s=2.5, parent=os.getpid())
    ...
    pulse.close()

A thread cannot: a C call that keeps the interpreter's lock for longer than a lease lasts silences it, and
others take over what is still being done. The helper beats as long as its parent exists, and no longer: it
ends with its standard input, or when the parent is another, or the record is gone. 20 ms to start.
"""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

_HELPER = """
import os, select, sys
record, beat_s, parent = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
while os.getppid() == parent:
    try:
        os.utime(record, follow_symlinks=False)
    except FileNotFoundError:
        break
    except OSError:
        pass
    if select.select([0], [], [], beat_s)[0]:
        break
"""


class Pulse:
    """Touches a record until it is closed or this process is gone."""

    def __init__(self, record: Path, *, beat_s: float, parent: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _HELPER, str(record), str(beat_s), str(parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-Z and Ctrl-C are for those who work
        )

    def close(self) -> None:
        """End it; safe twice."""
        if self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        self._process.wait()
