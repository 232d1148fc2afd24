"""The end of training, told from a hang: an exception is under way, the loop was left, the program is over.

A process that no longer steps may clean up, upload, or wait for its threads. What tells it from one that
hangs in its loop is the stack: while it trains, all stacks have the frames from the program's first to its
loop in common.
"""

from __future__ import annotations

import sys
from types import CodeType
from typing import Any

from stoker.watch.inside.doing import Places, Reader


class Leaving:
    """Learns where the loop is from stacks inside spans; asked by the watching thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._loop: tuple[CodeType, ...] = ()  # from the program's first frame to its loop's
        self._line = 0  # in that frame
        self._handled = 0  # what an exception handler around the loop is handling: its id keeps nothing alive

    def trains(self, places: Places, thread: int) -> None:
        """A stack from inside a span of the loop."""
        codes = tuple(code for code, _ in places)
        both = zip(self._loop, codes, strict=False) if self._loop else zip(codes, codes, strict=True)
        depth = next(
            (i for i, (a, b) in enumerate(both) if a is not b), min(len(self._loop or codes), len(codes))
        )
        self._loop = codes[:depth]
        self._line = places[depth - 1][1] if depth else 0
        self._handled = id(_handled(thread))

    def why(self, places: Places, thread: int) -> str:
        """Why this stack is not one of the loop; nothing where it may be."""
        error = _handled(thread)
        if error is not None and id(error) != self._handled:
            return f"{type(error).__name__} is under way"
        depth = len(self._loop)
        if not depth or not self._line:
            return ""
        if tuple(code for code, _ in places[:depth]) != self._loop:
            return "the loop is over"
        lines = self._reader.loop_lines(self._loop[-1], self._line)
        return "" if lines is None or lines[0] <= places[depth - 1][1] <= lines[1] else "the loop is over"


def _handled(thread: int) -> Any:
    """The exception a thread is handling: from the moment it is raised until its last `finally` is done."""
    current: dict[int, Any] = getattr(sys, "_current_exceptions", dict)()
    found = current.get(thread)
    return found[1] if isinstance(found, tuple) else found  # up to Python 3.11: type, value, traceback
