"""File handles kept open, and counters to rates: files of /proc and /sys that are read again and again."""

from __future__ import annotations

import os
from pathlib import Path

_MOST = 1 << 18


class Kept:
    """One such file; where it cannot be read it reads as nothing."""

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self._handle = -1

    def read(self) -> str:
        try:
            if self._handle < 0:
                self._handle = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            return os.pread(self._handle, _MOST, 0).decode("ascii", "replace")
        except OSError:
            self.close()
            return ""

    def close(self) -> None:
        """Safe twice."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


class Rate:
    """Counters into rates per second, over the time since the reading before."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, float]] = {}

    def per_second(self, t: float, counters: dict[str, float]) -> dict[str, float]:
        """Nothing of a counter seen for the first time; a counter that fell back began anew: nothing."""
        found = {}
        for name, value in counters.items():
            then, before = self._before.get(name, (t, value))
            if t > then and value >= before:
                found[name] = (value - before) / (t - then)
            self._before[name] = (t, value)
        return found
