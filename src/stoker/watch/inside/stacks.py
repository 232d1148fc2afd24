"""Sampling profiler of the loop: four looks a second at its stack, folded by the user's line.

The time outside every span has no hook that could tell it; a look at its frames does, and costs the loop what
it takes to wake a thread, which reads the hooks' marks anyway. Looks are weighed by the time since the one
before, and come at uneven times, so that they do not keep step with the loop.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from stoker.watch.inside.doing import Reader, text_of
from stoker.watch.inside.frames import is_library, places_of, spans_around
from stoker.watch.inside.switch import now
from stoker.watch.runs.files import write_meta

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

_WARM_UP = 3  # steps, in which modules are imported and garbage is made once
_LINES = 200  # that are kept apart; the rest of a long run's go by what they do alone
_SHOWN = 40
_FIRST_WRITE_S, _WRITE_SHARE = 1.0, 0.1  # of the time looked at: a day of looks is written some 100 times
_MOST_BETWEEN_S = 60.0
_BUSY = 0.1  # of a core: a thread that waits uses none, one that computes may have to share its core with ten
_LATE_S = 0.003  # an idle interpreter is had within a millisecond, a held one after its switch interval of 5


class Stacks:
    """What the loop was seen in; `look` and `write` are called by the watching thread."""

    def __init__(self, probe: Probe, path: Path) -> None:
        self._probe, self._path = probe, path
        self.reader = Reader()
        self._spent: dict[tuple[str, str, str], list[float]] = {}  # span, what, line → seconds, looks
        self._looked_at = self._written_at = now()
        self._seconds = 0.0
        self._held = _Held()
        self._collecting = Collecting()

    def start(self) -> None:
        gc.callbacks.append(self._collecting)

    def close(self) -> None:
        """Safe twice."""
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)
        self.write()

    def look(self, at: float, *, late_s: float) -> None:
        """One look at the loop, `late_s` after it was meant to be."""
        passed, self._looked_at = at - self._looked_at, at
        loop = self._probe.loop
        frames = sys._current_frames()
        frame = frames.get(loop.thread)
        if loop.number < _WARM_UP:
            self._collecting.forget()
        if frame is None or loop.number < 1:
            return
        inside = spans_around(frame, optimizing=self._probe.optimizing)
        found = self.reader.doing(places_of(frame))
        kind = inside[-1].kind if inside else "evaluation" if loop.evaluating else ""
        self._add((kind, found.what, found.line), passed)
        self._seconds += passed
        self._held.look(frames, loop.thread, at, late_s=late_s)
        if at - self._written_at >= min(max(_FIRST_WRITE_S, _WRITE_SHARE * self._seconds), _MOST_BETWEEN_S):
            self._written_at = at
            self.write()

    def write(self) -> None:
        if self._seconds:
            rows = sorted(self._spent.items(), key=lambda item: -item[1][0])[:_SHOWN]
            facts = {
                "seconds": self._seconds,
                "rows": [[*key, *spent] for key, spent in rows],
                "held": self._held.as_dict(),
                "gc": {
                    "seconds": self._collecting.seconds,
                    "count": self._collecting.count,
                    "lines": dict(self._collecting.lines),
                },
            }
            write_meta(self._path, facts)

    def _add(self, key: tuple[str, str, str], passed: float) -> None:
        if key not in self._spent and len(self._spent) >= _LINES:
            key = (key[0], key[1], "")
        spent = self._spent.setdefault(key, [0.0, 0])
        spent[0] += passed
        spent[1] += 1


class Collecting:
    """Time in the older generations of the garbage collector; it calls this itself."""

    def __init__(self) -> None:
        self.seconds, self.count, self._began = 0.0, 0, 0.0
        self.lines: dict[str, float] = {}  # the user's line that allocated → seconds
        self._line = ""

    def forget(self) -> None:
        """What was collected before the first step is not the loop's."""
        self.seconds, self.count = 0.0, 0
        self.lines.clear()

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 0:
            return
        if phase == "start":
            self._line = _allocating(sys._getframe(1))
            self._began = now()
        elif self._began:
            took = now() - self._began
            self.seconds += took
            self.count += 1
            if self._line in self.lines or len(self.lines) < _SHOWN:
                self.lines[self._line] = self.lines.get(self._line, 0.0) + took


def _allocating(frame: FrameType | None) -> str:
    """The innermost line of the user's program: a collection runs inside whatever allocates."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return text_of(frame.f_code, frame.f_lineno or 0) if frame else ""


class _Held:
    """Who keeps the interpreter busy beside the loop. We are late when somebody holds it, and then one of the
    threads that use the CPU is who does."""

    def __init__(self) -> None:
        self._looks = self._late = 0
        self._threads: dict[str, int] = {}
        self._used: dict[int, tuple[float, float]] = {}  # thread → when, and its CPU time by then

    def look(self, frames: dict[int, FrameType], loop: int, at: float, *, late_s: float) -> None:
        self._looks += 1
        if late_s < _LATE_S:
            return
        self._late += 1
        mine = threading.get_ident()
        for thread in threading.enumerate():
            frame = frames.get(thread.ident or 0)
            if thread.ident in (loop, mine) or frame is None or not self._busy(thread, at):
                continue
            line = f"{_user_line(frame)} (thread {thread.name})"
            if line in self._threads or len(self._threads) < _SHOWN:
                self._threads[line] = self._threads.get(line, 0) + 1

    def _busy(self, thread: threading.Thread, at: float) -> bool:
        """Has it used the CPU since it was last asked of?"""
        number = thread.native_id or 0
        cpu_s = _cpu_s(number)
        before_at, before = self._used.get(number, (at, cpu_s))
        self._used[number] = (at, cpu_s)
        return cpu_s - before > _BUSY * (at - before_at)

    def as_dict(self) -> dict[str, Any]:
        return {"looks": self._looks, "late": self._late, "threads": self._threads}


def _user_line(frame: FrameType) -> str:
    own = [place for place in places_of(frame) if not is_library(place[0].co_filename)]
    place = (own or places_of(frame) or [(frame.f_code, 0)])[-1]
    return text_of(place[0], place[0].co_firstlineno)


def _cpu_s(thread: int) -> float:
    try:
        with open(f"/proc/self/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


class Lateness:
    """How late a thread is awake for want of the interpreter: not for want of a core, which Linux counts."""

    def __init__(self) -> None:
        try:
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = -1
        self._delayed = self._delay_s()

    def since(self, due: float, at: float) -> float:
        before, self._delayed = self._delayed, self._delay_s()
        return max(0.0, at - due - (self._delayed - before))

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _delay_s(self) -> float:
        return int(os.pread(self._file, 64, 0).split()[1]) / 1e9 if self._file >= 0 else 0.0
