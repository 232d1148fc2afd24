"""How often to save: at given steps, or as often as measured costs and the failure rate advise."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import index
from typing import Literal

from stoker.errors import UsageError

_FIRST_AUTO_STEP = 10  # enough steps to know how long one takes

# Meta's Llama 3 report counts 419 unexpected interruptions of 16,384 GPUs in 54 days.
GPU_HOURS_PER_FAILURE = 16_384 * 54 * 24 / 419


class Interval:
    """Says at which steps to save. With "auto" the ranks must be told alike: `due` asks through rank 0."""

    def __init__(self, every: int | Literal["auto"]) -> None:
        self._every = every
        self._due_at = _FIRST_AUTO_STEP
        self._last: tuple[int, float] | None = None
        self._step_s = 0.0

    def note(self, step: int) -> None:
        """A step has ended."""
        now = time.monotonic()
        if self._last is not None and step > self._last[0]:
            one = (now - self._last[1]) / (step - self._last[0])
            self._step_s = 0.9 * self._step_s + 0.1 * one if self._step_s else one
        self._last = (step, now)

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
        if advice is None or not self._step_s:
            return _FIRST_AUTO_STEP
        return max(1, round(advice.interval_s / self._step_s))


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


def advise(*, stall_s: float, write_s: float, mtbf_s: float, restart_s: float = 120.0) -> Advice:
    """The interval of Young and Daly for what a save costs the loop. A save that runs in the background is
    not there until it is durable, so no interval is shorter than that."""
    if mtbf_s <= 0:
        raise UsageError(f"mtbf_s={mtbf_s} is no time between failures", hint="give seconds, say 86400")
    cost = max(stall_s, 1e-4)
    interval = max(_daly(cost, mtbf_s), write_s)
    loss = cost / interval + (interval / 2 + write_s + restart_s) / mtbf_s
    return Advice(interval_s=interval, loss=min(1.0, loss), stall_s=stall_s, write_s=write_s, mtbf_s=mtbf_s)


def _daly(cost: float, mtbf: float) -> float:
    if cost >= 2 * mtbf:
        return mtbf
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
