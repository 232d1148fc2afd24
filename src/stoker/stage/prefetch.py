"""Bring units before they are asked for, in the order in which they will be.

Threads take the next unit and bring it. When the budget is used up by what was brought for later, they
wait until the reader has moved on: prefetching never evicts what was used or brought since it began.
What a prefetch could not bring is not an error yet: whoever needs the file meets the reason himself.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from stoker.errors import CacheFullError, StokerError
from stoker.stage.fetch import Stopped
from stoker.stage.plan import Unit

AT_ONCE = 4  # units; each of them has several connections
_LOOK_AGAIN_S = 1.0  # for room that another process made


class Prefetcher:
    """Brings units in the background. `close` when `bring` has been told to stop."""

    def __init__(
        self, units: Sequence[Unit], *, bring: Callable[[Unit, float], None], at_once: int = AT_ONCE
    ) -> None:
        self._units, self._bring = deque(units), bring
        self._began = time.time()
        self._moved = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"stoker-prefetch-{n}", daemon=True)
            for n in range(min(at_once, len(units)))
        ]
        for thread in self._threads:
            thread.start()

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
        with suppress(Stopped, IndexError):
            while not self._closed:
                self._bring_one(self._units.popleft())

    def _bring_one(self, unit: Unit) -> None:
        while not self._closed:
            try:
                return self._bring(unit, self._began)
            except CacheFullError:
                with self._moved:
                    if not self._closed:
                        self._moved.wait(_LOOK_AGAIN_S)
            except StokerError:
                return None
        return None
