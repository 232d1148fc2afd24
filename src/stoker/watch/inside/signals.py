"""SIGTERM that the program heeds itself: noted, so that a job that then leaves with exit 0 was told to end.

Only Python handlers are wrapped, and whoever asks for one gets his own back. The handler puts down a time and
a number, and nothing else: it runs between any two instructions of the main thread, which may hold any lock.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

NOTED = (signal.SIGTERM,)


class Told:
    """The last such signal: when, and which; (0, 0) while none came."""

    def __init__(self) -> None:
        self.last = (0.0, 0)

    def hook(self) -> None:
        """Wrap what is set and what will be. Only the main thread may set handlers."""
        set_handler, get_handler = signal.signal, signal.getsignal

        def signal_(signalnum: int, handler: Any) -> Any:
            return _own(set_handler(signalnum, self._noting(signalnum, handler)))

        def getsignal(signalnum: int) -> Any:
            return _own(get_handler(signalnum))

        signal_.__name__, signal_.__doc__ = "signal", set_handler.__doc__
        getsignal.__doc__ = get_handler.__doc__
        if threading.current_thread() is threading.main_thread():
            for number in NOTED:
                current = get_handler(number)
                if self._noting(number, current) is not current:
                    set_handler(number, self._noting(number, current))
        signal.signal, signal.getsignal = signal_, getsignal

    def _noting(self, number: int, handler: Any) -> Any:
        if number not in NOTED or not callable(handler) or isinstance(handler, (_Noting, signal.Handlers)):
            return handler
        return _Noting(handler, self)


class _Noting:
    """A handler of the program's, and a note that it was called."""

    def __init__(self, handler: Callable[..., Any], told: Told) -> None:
        self.handler, self._told = handler, told

    def __call__(self, number: int, frame: Any) -> Any:
        self._told.last = (time.monotonic(), number)
        return self.handler(number, frame)


def _own(handler: Any) -> Any:
    return handler.handler if isinstance(handler, _Noting) else handler
