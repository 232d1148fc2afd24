"""Leaving together: a signal that reaches any rank becomes one step after which all ranks leave.

A signal handler only takes a note. A thread of every rank looks for notes on the board; when there is one,
it says which step this rank has begun last, and from then on the loop's thread does not pass another step
before it knows what all ranks have said. They leave after the first step that none of them had passed:

    rank 0   ... step 7 ─ says 7 ─ step 8: waits for the answer, 8 > 8? no ─ step 9: leaves
    rank 1   ... step 8 ─ says 8 ─ step 9: waits for the answer, 9 > 8? yes: leaves

What is waited for needs no loop to go on, only these threads, so that no collective can stand in between.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from stoker.errors import StokerError, UsageError
from stoker.world import World

if TYPE_CHECKING:
    from stoker.checkpoint.board import Board

_POLL_S = 0.2
_LEAST_S = 10.0
_LOOKS_PER_S = 4000  # of all ranks together: a board answers some ten times as many


class Notice:
    """Remembers the first signal of those that mean "leave soon". Made and closed in the main thread."""

    def __init__(self, names: Sequence[str]) -> None:
        self.name = ""
        self.came_at = 0.0  # monotonic
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}  # Any: what was there before, a function or a word of `signal`
        numbers = [signal_number(name) for name in names]
        self.listens = bool(numbers)
        if numbers and threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "save_on_signal is given to a Checkpointer outside of the main thread, where Python has no "
                "signals",
                hint="make the Checkpointer in the main thread, or leave save_on_signal out",
            )
        for number in numbers:
            self._before[number] = signal.signal(number, self._note)

    def take(self) -> None:
        """Take the signals again, from whoever has taken them over since."""
        for number in self._before:
            signal.signal(number, self._note)

    def _note(self, number: int, frame: Any) -> None:
        # it may interrupt any line of the loop, itself too: no lock, no output
        before = self._before.get(number)
        if os.getpid() != self._pid:  # a forked child, which is not the one to save: as if we were not here
            signal.signal(number, before if before is not None else signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        again = bool(self.name)
        if not again:
            self.came_at, self.name = time.monotonic(), signal.Signals(number).name
        # the interpreter's own for Ctrl-C would end the loop at once: the second one may
        if callable(before) and (again or before is not signal.default_int_handler):
            before(number, frame)

    def close(self) -> None:
        """Give the signals back, where nobody has taken them over since; safe twice."""
        for number, before in self._before.items():
            with suppress(ValueError):  # not in the main thread: a finalizer
                if signal.getsignal(number) == self._note and os.getpid() == self._pid:
                    signal.signal(number, before if before is not None else signal.SIG_DFL)
        self._before = {}


def signal_number(name: str) -> int:
    number = getattr(signal, name, None) if name.startswith("SIG") else None
    if not isinstance(number, signal.Signals) or number in (signal.SIGKILL, signal.SIGSTOP):
        raise UsageError(
            f"save_on_signal={name!r} is no signal that a program can catch",
            hint='give names, say ("SIGTERM", "SIGUSR1")',
        )
    return number


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodbye:
    """Why all ranks leave now. Without `agreed` this rank leaves alone: some did not answer in time."""

    reason: str
    agreed: bool = True
    silent: tuple[int, ...] = ()  # ranks
    came_at: float = 0.0  # monotonic

    def left_s(self, grace_s: float) -> Callable[[], float]:
        """How much of the grace is left, asked again and again. A long step may have taken all of it: then
        some seconds are tried, since nobody may be in such a hurry after all."""
        ends = max(self.came_at + grace_s, time.monotonic() + _LEAST_S)
        return lambda: max(0.1, ends - time.monotonic())


class Leaving:
    """Agrees on the last step. The loop's thread calls `after`, a thread of its own does the rest."""

    def __init__(self, board: Board, world: World, notice: Notice, *, grace_s: float) -> None:
        self._board, self._world, self._notice, self._grace_s = board, world, notice, grace_s
        self._passed = -1  # the last step that the loop has passed
        self._asked_at = 0.0  # since when the loop waits for the answer before it passes another
        self._reason, self._last = "", 0
        self._lock, self._known, self._wake = threading.Lock(), threading.Event(), threading.Event()
        self._ends = False
        self._thread: threading.Thread | None = None
        if world.size > 1 and notice.listens:
            self._thread = threading.Thread(target=self._run, name="stoker-leave", daemon=True)
            self._thread.start()

    def after(self, step: int) -> Goodbye | None:
        """Whether all leave after this step, which has ended. Costs a lock until there is a signal."""
        if self._world.size == 1:
            return Goodbye(reason=self._notice.name, came_at=self._came_at) if self._notice.name else None
        with self._lock:
            if not self._asked_at and not self._notice.name:
                self._passed = step
                return None
        self._wake.set()
        if not self._known.wait(self._grace_s):
            return Goodbye(reason=self._why(), agreed=False, silent=self._silent(), came_at=self._came_at)
        return Goodbye(reason=self._reason, came_at=self._came_at) if step > self._last else None

    def close(self) -> None:
        """Go: the others need not wait for an answer of this rank any more. Safe twice."""
        if self._thread is None:
            return
        self._ends = True
        self._wake.set()
        self._thread.join()
        self._thread = None

    def _run(self) -> None:
        every = max(_POLL_S, self._world.size / _LOOKS_PER_S)
        with suppress(StokerError):  # the board is gone, and rank 0 with it
            while not self._is_asked() and not self._ends:
                self._wake.wait(every)
            self._answer()
            while (note := self._board.look("leave/after")) is None and not self._ends:
                time.sleep(every / 10)
            if note:
                plain = json.loads(note)
                self._reason, self._last = plain["reason"], plain["last"]
                self._known.set()

    def _is_asked(self) -> bool:
        """Whether any rank has a signal: a note on the board, where this one puts its own."""
        if self._notice.name:
            self._board.post("leave", self._why().encode())
            return True
        return self._board.look("leave") is not None

    def _answer(self) -> None:
        """Say which step this rank has passed; who is the last to say something says it all. A rank that
        closes says it too, asked or not: one that it did not hear of yet may be waiting."""
        with self._lock:
            self._asked_at = time.monotonic()
            passed = self._passed
        self._board.post(f"leave/{self._world.rank}", str(passed).encode())
        if self._board.count("leave/said", 1) == self._world.size:
            said = [self._board.look(f"leave/{rank}") for rank in range(self._world.size)]
            last = max(int(one or b"-1") for one in said)
            reason = (self._board.look("leave") or b"").decode()
            self._board.post("leave/after", json.dumps({"reason": reason, "last": last}).encode())

    @property
    def _came_at(self) -> float:
        return self._notice.came_at or self._asked_at

    def _why(self) -> str:
        return f"{self._notice.name or 'a signal'} on rank {self._world.rank}"

    def _silent(self) -> tuple[int, ...]:
        with suppress(StokerError):
            ranks = range(self._world.size)
            return tuple(rank for rank in ranks if self._board.look(f"leave/{rank}") is None)
        return (0,)  # it serves the board


def is_done(pending: Future[Any], *, within_s: float) -> bool:
    try:
        pending.exception(within_s)
    except TimeoutError:
        return False
    return True


def unsaved(goodbye: Goodbye) -> str:
    return (
        f"{goodbye.reason}, and ranks {list(goodbye.silent)} have not answered: nothing was saved, since all "
        "must save the same step. They have died or hang, or have no save_on_signal. The last checkpoint is "
        "as it was"
    )


def unfinished(goodbye: Goodbye, step: int, grace_s: float) -> str:
    return (
        f"{goodbye.reason}: step {step} is not durable after the {grace_s:.0f} s of grace_s, and still being "
        "written. Give the job more time, and say so with grace_s, or save to a faster disk"
    )
