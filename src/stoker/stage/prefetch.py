"""Prefetch: units brought before they are asked for, in the order in which they will be.

Threads take the next unit and bring it. When the budget is used up by what was brought for later, they
wait until the reader has moved on: what was brought and not used yet is never evicted for what comes later.
What a prefetch could not bring is not an error yet: whoever needs the file meets the reason himself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from stoker.errors import CacheFullError, StokerError
from stoker.stage.plan import Unit

AT_ONCE = 4  # units; each of them has several connections
_LOOK_AGAIN_S = 1.0  # for room that another process made
_NOT_AT_ONCE_S = 0.1  # a reader lets go of files many times a second, and looking for room is not free


class Lookahead:
    """Where room is short: brings what is needed next and does not lie here, one at a time and again and
    again, as long as there is room for it. `next_unit` says which; none while somebody waits for another."""

    def __init__(self, next_unit: Callable[[], Unit | None], bring: Callable[[Unit], None]) -> None:
        self._next_unit, self._bring = next_unit, bring
        self._moved = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="stoker-prefetch", daemon=True)
        with suppress(RuntimeError):  # no more threads may be started: readers fetch what they need
            self._thread.start()

    def moved_on(self) -> None:
        """The reader came to the next use of something, or let go of it."""
        with self._moved:
            self._moved.notify()

    def close(self) -> None:
        """End the thread; safe twice."""
        with self._moved:
            self._closed = True
            self._moved.notify()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            unit = self._next_unit()
            if unit is None or not self._brought(unit):
                self._wait()

    def _brought(self, unit: Unit) -> bool:
        try:
            self._bring(unit)
            return True
        except StokerError:  # no room before what is needed sooner, or what whoever needs it will meet
            return False

    def _wait(self) -> None:
        with self._moved:
            if not self._closed:
                self._moved.wait(_LOOK_AGAIN_S)
        with self._moved:
            self._moved.wait_for(lambda: self._closed, _NOT_AT_ONCE_S)


class Prefetcher:
    """Brings units in the background. `close` when `bring` has been told to stop."""

    def __init__(self, bring: Callable[[Unit], None], *, at_once: int = AT_ONCE) -> None:
        self._bring, self._at_once = bring, at_once
        self._units: deque[Unit] = deque()
        self._moved = threading.Condition()
        self._closed = False
        self._threads: list[threading.Thread] = []

    def follow(self, units: Sequence[Unit]) -> None:
        """Bring these, in this order; what was asked for earlier and has not begun gives way."""
        with self._moved:
            self._units = deque(units)
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            for _ in range(min(self._at_once - len(self._threads), len(units))):
                thread = threading.Thread(target=self._run, name="stoker-prefetch", daemon=True)
                with suppress(RuntimeError):  # no more threads may be started: readers fetch what they need
                    thread.start()
                    self._threads.append(thread)
            self._moved.notify_all()

    def moved_on(self) -> None:
        """The reader let go of something: there may be room now."""
        with self._moved:
            self._moved.notify_all()

    def close(self) -> None:
        """End the threads; safe twice."""
        with self._moved:
            self._closed = True
            self._moved.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while units := self._next():
            unit, others = units
            try:
                self._bring(unit)
            except CacheFullError:
                self._wait_for_room(unit, others)
            except StokerError:
                continue

    def _next(self) -> tuple[Unit, deque[Unit]] | None:
        with self._moved:
            units = self._units
            return (units.popleft(), units) if units and not self._closed else None

    def _wait_for_room(self, unit: Unit, others: deque[Unit]) -> None:
        """It goes first when something may have given way, unless another order holds meanwhile."""
        with self._moved:
            others.appendleft(unit)
            if others is not self._units:
                return
            self._moved.wait_for(lambda: self._closed, _NOT_AT_ONCE_S)
            if not self._closed and others is self._units:
                self._moved.wait(_LOOK_AGAIN_S)
