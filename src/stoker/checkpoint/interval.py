"""Checkpoint interval: how often to save, at given steps or as measured costs and the failure rate advise."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Literal

from stoker.errors import UsageError

_FIRST_AUTO_STEP = 10  # enough steps to know how long one takes
_QUIET_STEPS = 33
_NEVER = 1e15  # steps

# Meta's Llama 3 report counts 419 unexpected interruptions of 16,384 GPUs in 54 days.
GPU_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419


class Interval:
    """Says at which steps to save. With "auto" the ranks must be told alike: `due` asks through rank 0."""

    def __init__(self, every: int | Literal["auto"]) -> None:
        self._every = every
        self._due_at = _FIRST_AUTO_STEP
        self._last: tuple[int, float] | None = None
        self._quiet: deque[float] = deque(maxlen=_QUIET_STEPS)
        self.lost_s = 0.0  # to the last save so far: its stall, and what steps beside it took longer

    def note(self, step: int, *, saving: bool = False) -> None:
        """A step has ended; `saving` if a save was under way in it."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            steps, passed_s = step - self._last[0], now - self._last[1]
            if not saving:
                self._quiet.append(passed_s / steps)
            elif self._quiet:
                self.lost_s += max(0.0, passed_s - steps * self.step_s)
        self._last = (step, now)

    def saved(self) -> None:
        """A save begins."""
        self.lost_s = 0.0

    @property
    def step_s(self) -> float:
        """How long a step takes while nothing is saved; 0 if that is not known yet."""
        return statistics.median(self._quiet) if self._quiet else 0.0

    def restored(self, step: int) -> None:
        self._due_at = step + _FIRST_AUTO_STEP

    def is_due(self, step: int, *, steps: Callable[[], int]) -> bool:
        """Whether to save at this step; `steps` gives how many it is to the next, on every rank alike."""
        if self._every == "auto":
            if step < self._due_at:
                return False
            self._due_at = step + steps()
            return True
        return bool(self._every) and step > 0 and step % self._every == 0

    def advised_steps(self, advice: Advice | None) -> int:
        """Steps until the save after this one; few until one has been measured."""
        if advice is None or not self.step_s:
            return _FIRST_AUTO_STEP
        return max(1, round(min(advice.interval_s / self.step_s, _NEVER)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """How often to save, and what saving and failing then cost together."""

    interval_s: float
    loss: float  # share of the time that is lost to saves and failures
    stall_s: float
    write_s: float
    mtbf_s: float


def mtbf_of(ranks: int) -> float:
    """Seconds between failures of a job of so many GPUs, when nothing better is known."""
    return GPU_HOURS_PER_FAILURE * 3600 / ranks


def advise(
    *, stall_s: float, write_s: float, mtbf_s: float, lost_s: float = 0.0, restart_s: float = 120.0
) -> Advice:
    """The interval of Young and Daly for what a save costs the loop: its stall or, where more was measured,
    all that it lost while the save was written. A save that runs in the background is not there until it is
    durable, so no interval is shorter than that."""
    if not mtbf_s > 0:
        raise UsageError(f"mtbf_s={mtbf_s} is no time between failures", hint="give seconds, say 86400")
    cost = max(stall_s, lost_s, 1e-4)
    interval = max(_daly(cost, mtbf_s), write_s)
    loss = cost / interval + (interval / 2 + write_s + restart_s) / mtbf_s
    return Advice(interval_s=interval, loss=min(1.0, loss), stall_s=stall_s, write_s=write_s, mtbf_s=mtbf_s)


def _daly(cost: float, mtbf: float) -> float:
    if cost >= 2 * mtbf:
        return mtbf
    if math.isinf(mtbf):
        return math.inf
    half = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(half) / 3 + half / 9) - cost


def whole_step(step: int) -> int:
    """The step as Python's own number: a counter may be a tensor's or numpy's."""
    try:
        number = index(step)
    except TypeError:
        number = -1
    if number < 0:
        raise UsageError(f"step={step!r} is no whole number", hint="give how many steps were taken")
    return number
