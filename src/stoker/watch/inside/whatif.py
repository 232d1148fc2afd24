"""Ablation of data cost: windows of real batches alternate with windows of one batch served again."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

VARIABLE = "STOKER_WATCH_WHAT_IF"
_WARM = 10  # batches before the first window
_WINDOW_S = 3.0
_WINDOW_BATCHES = 8  # and at least so many, where steps are long


class Cached:
    """Decides for each batch of the training loader whether it is a real one."""

    def __init__(self, probe: Probe) -> None:
        self._probe = probe
        self._batch: Any = None
        self._served = self._left = 0
        self._until = 0.0
        self._cached = False
        self._windows: list[tuple[bool, float]] = []

    @classmethod
    def from_environ(cls, probe: Probe) -> Cached | None:
        return cls(probe) if os.environ.get(VARIABLE) == "data" else None

    def next(self, iterator: Any, original: Any) -> Any:
        self._served += 1
        self._turn(time.monotonic())
        if self._cached and self._batch is not None:
            return self._batch
        batch = original(iterator)
        self._batch = batch
        return batch

    def _turn(self, now: float) -> None:
        """Begin another window when this one has lasted."""
        self._left -= 1
        if self._served < _WARM or (now < self._until or self._left > 0):
            return
        self._cached = not self._cached if self._windows else False
        self._windows.append((self._cached, now))
        self._until, self._left = now + _WINDOW_S, _WINDOW_BATCHES
        self._probe.tell(what_if=[{"cached": cached, "at": at} for cached, at in self._windows])
