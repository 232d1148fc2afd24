"""Threads of one kind, started as there is work for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

Work = Callable[[], None]


class Crew:
    """Up to so many threads that do what `take` gives them. All crews of an owner share one condition: `take`
    and `call` are called with it held, work is done without."""

    def __init__(
        self,
        name: str,
        take: Callable[[], Work | None],
        *,
        most: int,
        changed: threading.Condition,
        look_s: float | None = None,
    ) -> None:
        """`look_s`: how often to look for work that nobody calls for."""
        self._name, self._take, self._most, self._changed, self._look_s = name, take, most, changed, look_s
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def call(self) -> None:
        """There may be work."""
        if self._idle:
            self._changed.notify_all()
        elif len(self._threads) < self._most and not self._closed:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            with suppress(RuntimeError):  # no more may be started: those there are go on
                thread.start()
                self._threads.append(thread)

    def close(self) -> None:
        """End the threads once they have done what they do; safe twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while work := self._next():
            work()

    def _next(self) -> Work | None:
        with self._changed:
            while not self._closed:
                if work := self._take():
                    self.call()  # there may be work for one more
                    return work
                self._idle += 1
                self._changed.wait(self._look_s)
                self._idle -= 1
        return None
