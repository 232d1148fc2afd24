"""Statistics of trials: a gain with its confidence interval from pairs of windows, and whether losses agree.

A pair is a window of the program unchanged and one with the setting, right after each other: what a machine
does slowly to both cancels. Ratios of a pair are compared by their logarithms; the interval is Student's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

LEAST = 1.03  # a gain that is worth a change to a program
FURTHER = 1.06  # one that is worth another knob: of two single windows less is noise
ENOUGH = 3  # pairs from which on an interval says something
# Student's t, 97.5%, by degrees of freedom from 1 on.
_T = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_SAME = 1e-4  # of a loss: sums in another order differ by less, other data by more
_FIRST = 3  # losses that are compared: rounding grows from step to step

SAME, DIFFER, UNSEEDED, UNSEEN = "same", "differ", "unseeded", "unseen"
LOSSES = {
    SAME: "the first losses are the same as without it",
    DIFFER: "the first losses differ from those without it: samples or random numbers come otherwise",
    UNSEEDED: "not checked: two unchanged runs had other first losses (the program is not seeded)",
    UNSEEN: "not checked: no losses were seen",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """How many times as fast, and between which bounds with 95% confidence."""

    times: float
    low: float
    high: float
    pairs: int

    @property
    def proven(self) -> bool:
        """Worth having by its middle, and above nothing by its lower bound."""
        return self.pairs >= ENOUGH and self.times >= LEAST and self.low > 1.0

    @property
    def settled(self) -> bool:
        """More pairs would not change what is said."""
        if self.pairs < ENOUGH:
            return False
        return self.high < LEAST or (self.proven and self.high / self.low < 1.1)

    def __str__(self) -> str:
        return f"{self.times:.2f}× ({self.low:.2f}–{self.high:.2f})"

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def gain_of(pairs: Sequence[tuple[float, float]]) -> Gain:
    """Of pairs of seconds: unchanged, and with the setting. Of one pair nothing bounds it."""
    logs = [math.log(plain / tried) for plain, tried in pairs]
    middle = statistics.fmean(logs)
    if len(logs) < 2:
        return Gain(times=math.exp(middle), low=0.0, high=math.inf, pairs=len(logs))
    t = _T[min(len(logs) - 2, len(_T) - 1)]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    low, high = math.exp(middle - half), math.exp(middle + half)
    return Gain(times=math.exp(middle), low=low, high=high, pairs=len(logs))


def compare_losses(plain: Sequence[Sequence[float]], tried: Sequence[float]) -> str:
    """First losses of unchanged runs, and of one with a setting."""
    if not tried or not any(plain):
        return UNSEEN
    known = [one for one in plain if one]
    if len(known) > 1 and not all(_agree(known[0], one) for one in known[1:]):
        return UNSEEDED
    if len(known) < 2 and not _agree(known[0], tried):
        return UNSEEDED  # nobody knows yet whether two unchanged runs agree
    return SAME if _agree(known[0], tried) else DIFFER


def _agree(one: Sequence[float], other: Sequence[float]) -> bool:
    pairs = list(zip(one[:_FIRST], other[:_FIRST], strict=False))
    return all(
        (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=_SAME, abs_tol=1e-9) for a, b in pairs
    )
