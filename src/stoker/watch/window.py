"""Time-limited run: a command is ended when it has stepped for long enough, and what it started with it."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from stoker.processes import environ_of, lives
from stoker.watch.inside.boot import VARIABLE
from stoker.watch.runs.batches import SETTLE
from stoker.watch.runs.columns import read_ring
from stoker.watch.runs.files import node_name
from stoker.watch.sampler import trainers

_LOOK_S = 0.1
_LEAST = 5  # steps to measure, where they are longer than the window
_GRACE_S = 60.0  # what a job may take to save and leave; torchrun alone gives its workers 30
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Window:
    """Asked by `watch` about the command it waits for, from its thread."""

    def __init__(self, folder: Path, *, seconds: float) -> None:
        self._folder, self._seconds = folder, seconds
        self._over_at: float | None = None
        self.grace_s = _GRACE_S
        self.interrupted = False  # somebody else has ended the command: no other is to follow

    @property
    def over(self) -> bool:
        """Has the command been told to end?"""
        return self._over_at is not None

    def look(self, pid: int) -> float:
        """End the command where it is time; gives the seconds until the next look."""
        now = time.monotonic()
        if self._over_at is None:
            if self._lasted():
                self._over_at = now
                os.kill(pid, signal.SIGTERM)
        elif now > self._over_at + self.grace_s:
            os.kill(pid, signal.SIGKILL)
        return _LOOK_S

    def passed_on(self, number: int) -> None:
        self.interrupted = self.interrupted or number in _INTERRUPTS

    def close(self) -> None:
        """A shell that is told to end leaves its children to themselves, and they would train on beside the
        next run: end them too. Safe twice."""
        left = [pid for pid in trainers(self._folder, node_name()) if self._started(pid)] if self.over else []
        for number, grace_s in ((signal.SIGTERM, self.grace_s), (signal.SIGKILL, 5.0)):
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + grace_s
            while left and time.monotonic() < deadline:
                time.sleep(_LOOK_S / 10)
                left = [pid for pid in left if lives(pid)]

    def _lasted(self) -> bool:
        return any(self._stepped(path) for path in self._folder.glob("steps-*.ring"))

    def _stepped(self, path: Path) -> bool:
        ends = read_ring(path).records["end"]
        return len(ends) >= SETTLE + _LEAST and float(ends[-1] - ends[SETTLE - 1]) >= self._seconds

    def _started(self, pid: int) -> bool:
        """Is this process of the run? The number in a file may be that of a stranger in another container."""
        return lives(pid) and environ_of(pid).get(VARIABLE) == str(self._folder.absolute())


class StepWindow(Window):
    """Ends a trial after so many steps; or when it is slower, or silent for longer, than it is worth."""

    def __init__(
        self,
        folder: Path,
        *,
        steps: int,
        settle: int,
        slowest_s: float,
        silent_s: float,
        most: int = 0,
        least_s: float = 0.0,
    ) -> None:
        """One that is over sooner than in `least_s` goes on until then, or up to step `most`."""
        super().__init__(folder, seconds=0.0)
        self._steps, self._settle, self._most, self._least_s = steps, settle, most, least_s
        self._slowest_s, self._silent_s = slowest_s, silent_s
        self._began = time.monotonic()
        self.gave_up = ""  # why it was ended before its last step
        self.grace_s = 10.0

    def close(self) -> None:
        """Loader workers of a program that was killed look for their parent every five seconds: until then
        they would take cores from the next trial."""
        super().close()
        end_all(self._folder)

    def _lasted(self) -> bool:
        if super()._lasted():
            return True
        ends = max((self._ends(path) for path in self._folder.glob("steps-*.ring")), key=len, default=[])
        now = time.monotonic()
        if self._settle < len(ends) < self._steps and now - ends[self._settle - 1] > self._slowest_s:
            self.gave_up = "slower"
        elif now - (ends[-1] if len(ends) else self._began) > self._silent_s:
            self.gave_up = "silent"
        return bool(self.gave_up)

    def _stepped(self, path: Path) -> bool:
        ends = self._ends(path)
        if len(ends) < self._steps:
            return False
        return len(ends) >= self._most or ends[-1] - ends[self._settle - 1] >= min(
            self._least_s, self._slowest_s
        )

    def _ends(self, path: Path) -> list[float]:
        return [float(end) for end in read_ring(path).records["end"]]


class AnswerWindow(Window):
    """Ends a run when so many processes have put a file of that name, or it took too long."""

    def __init__(self, folder: Path, *, name: str, answers: int, patience_s: float) -> None:
        super().__init__(folder, seconds=0.0)
        self._name, self._answers = name, answers
        self._until = time.monotonic() + patience_s
        self.grace_s = 2.0  # they wait to be ended: nothing of theirs is to be saved

    def close(self) -> None:
        super().close()
        end_all(self._folder)

    def _lasted(self) -> bool:
        return len(list(self._folder.glob(self._name))) >= self._answers or time.monotonic() > self._until


def end_all(folder: Path) -> None:
    """Every process of a run, by the variable that it was started with."""
    mine = str(folder.absolute())
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        if pid != os.getpid() and environ_of(pid).get(VARIABLE) == mine:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
