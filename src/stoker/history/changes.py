"""Change points: where a series of measurements moved to another level, told apart from its noise. Pure.

A segment is split where the means of its two sides differ most, if they differ more than chance explains, and
each side is looked at again (binary segmentation, as E-divisive does). A split counts where two tests agree:

- Student's t of the two sides. Values are clipped at a few robust deviations: one bad night, or a heavy tail,
  moves a mean by little. Neighbouring runs resemble each other (a warm machine, a busy week): the lag-one
  autocorrelation left after the split widens the error and takes degrees of freedom, by the formula for
  AR(1). All splits were tried, so the chance is multiplied by their number (Bonferroni).
- A permutation test: how often the same runs in another order are parted as well, whatever their
  distribution. So two runs alone never make a change, however still the series was before.

`benchmarks/history_check.py` has the rates of false alarms and of changes found, beside Apache Otava's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

from stoker.recording import Floats

SURE = 0.005  # a chance below which a change counts: benchmarks/history_check.py shows what follows from it
RECENT = 10  # the newest runs: a check is about them, and half of the chance is kept for changes there
_FEWEST = 2  # runs of a side
_CLIP = 3.5  # deviations beyond which a value counts as so far away: of normal noise 1 in 2,000
_MOST_ALIKE = 0.9  # autocorrelation above which a series is a drift, and no mean has an error
_WINDOWED = 24  # runs from which on parts of a segment are looked at, too
_DRAWS = 1999  # permutations: the surest they can be is 1 in 2,000, well below SURE


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """From `index` on a series has another level; levels are medians of the runs between changes."""

    index: int
    before: float
    after: float
    chance: float  # that runs without any change would look like this

    @property
    def ratio(self) -> float:
        """1.05: what follows is 5% higher."""
        return self.after / self.before if self.before else math.inf


def find_changes(values: Sequence[float], *, sure: float = SURE) -> list[Change]:
    """All changes of a series in their order; values are in the order of time and finite."""
    series = np.asarray(values, np.float64)
    found = dict(_splits(series, 0, sure))
    edges = [0, *sorted(found), len(series)]
    levels = [float(np.median(series[a:b])) for a, b in pairwise(edges) if b > a]
    return [
        Change(index=index, before=before, after=after, chance=found[index])
        for index, before, after in zip(edges[1:-1], levels, levels[1:], strict=False)
    ]


def _splits(series: Floats, offset: int, sure: float) -> list[tuple[int, float]]:
    """Where a segment is split, and the chance of each."""
    best = best_split(series)
    if best is None or best[1] >= sure:
        best = _in_windows(series)
    if best is None or best[1] >= sure:
        return []
    at, chance = best
    left, right = _splits(series[:at], offset, sure), _splits(series[at:], offset + at, sure)
    return [*left, (offset + at, chance), *right]


def best_split(series: Floats) -> tuple[int, float] | None:
    """The index that parts a segment best, and the chance that one without a change is parted so well."""
    size = len(series)
    if size < 2 * _FEWEST or not np.ptp(series):
        return None
    clipped = _clipped(series)
    parted = _parted(clipped)
    at = int(np.argmax(parted)) + _FEWEST
    chance = _chance(clipped, at) * _tried(size, at)
    if chance < SURE and (often := _permuted(clipped, float(parted.max()))) >= SURE:
        chance = often  # a gate only: permutations cannot say how far below SURE a chance is
    return at, min(1.0, chance)


def _in_windows(series: Floats) -> tuple[int, float] | None:
    """The first and the last two thirds: a change and its repair hide each other in the whole, which then
    looks like neighbours that resemble each other."""
    size = len(series)
    if size < _WINDOWED:
        return None
    found = [
        (start + best[0], 3 * best[1])  # three looks at one series
        for start, end in ((0, 2 * size // 3), (size // 3, size))
        if (best := best_split(series[start:end]))
    ]
    return min(found, key=lambda one: one[1], default=None)


def _parted(rows: Floats) -> Floats:
    """How well each split parts a series, or each of many: the squared gap of means, weighed by counts."""
    size = rows.shape[-1]
    counts = np.arange(_FEWEST, size - _FEWEST + 1)
    sums = np.cumsum(rows - rows.mean(axis=-1, keepdims=True), axis=-1)[..., counts - 1]
    parted: Floats = sums**2 * size / (counts * (size - counts))
    return parted


def _tried(size: int, at: int) -> int:
    """How many splits a chance is shared among: half of it goes to the newest, which a check is about."""
    splits = size - 2 * _FEWEST + 1
    if splits <= RECENT:
        return splits
    is_recent = size - at < RECENT + _FEWEST
    return 2 * (RECENT if is_recent else splits - RECENT)


def _permuted(series: Floats, best: float) -> float:
    """How often the same runs in another order are parted as well: whatever their distribution."""
    draw = np.random.default_rng(0)  # the same series always gets the same answer
    rows = draw.permuted(np.broadcast_to(series, (_DRAWS, len(series))), axis=1)
    return (1 + int((_parted(rows).max(axis=1) >= best * (1 - 1e-9)).sum())) / (1 + _DRAWS)


def _chance(clipped: Floats, at: int) -> float:
    """That two sides differ so much, by Student's t with an error that knows of neighbours."""
    size = len(clipped)
    left, right = clipped[:at], clipped[at:]
    rest = np.concatenate([left - left.mean(), right - right.mean()])
    spread = float(rest @ rest) / (size - 2)
    if spread <= 0:
        return 1.0 / math.comb(size, at)  # still on both sides: as often as an order parts them so
    alike = _alike(rest)
    error = spread * size / (at * (size - at)) * alike
    t = abs(float(right.mean() - left.mean())) / math.sqrt(error)
    return _two_sided(t, max(1.0, size / alike - 2))


def _alike(rest: Floats) -> float:
    """By how much neighbours that resemble each other widen the variance of a mean: (1 + r) / (1 - r).

    What is left after two means were taken away looks less alike than it is: by about (2 + 4r) / n. And r is
    drawn towards none as far as so few runs cannot tell it from none."""
    size, total = len(rest), float(rest @ rest)
    r = float(rest[1:] @ rest[:-1]) / total
    r = max(0.0, r + (2 + 4 * r) / size)
    r = min(r * r**2 / (r**2 + 0.5 / size), _MOST_ALIKE) if r else 0.0
    return (1 + r) / (1 - r)


def _clipped(values: Floats) -> Floats:
    """What lies further from the middle than noise does counts as just so far."""
    middle = float(np.median(values))
    off = np.abs(values - middle)
    scale = 1.4826 * float(np.median(off)) or 1.2533 * float(
        off.mean()
    )  # both are a deviation of normal noise
    clipped: Floats = np.clip(values, middle - _CLIP * scale, middle + _CLIP * scale)
    return clipped


def _two_sided(t: float, freedom: float) -> float:
    """Student's t as a normal deviate (Wallace 1959: right to a percent of z from three degrees on)."""
    z = (8 * freedom + 1) / (8 * freedom + 3) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return 2 * NormalDist().cdf(-z)
