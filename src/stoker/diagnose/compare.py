"""A/B comparison of two runs: is the second quicker, by how much, how sure, and where did the time move."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.features import features
from stoker.diagnose.rules import judge
from stoker.diagnose.timeline import STATES
from stoker.errors import BadInputError
from stoker.formats.sizes import counted
from stoker.recording import Floats, Recording

DRAWS = 2000  # of the bootstrap: the borders of a 95% interval move by under 1% of its width beyond that
FEWEST = 5  # steps of a run that say anything about the next one's
WARM_UP = 2  # steps left out at the beginning: they compile and tune
SURE = 0.01  # a chance below which a difference counts
NOTABLE = 0.02  # a state that moved by less of a step is noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Step times of A against B: `ratio` above 1 says that B takes longer."""

    median_s: tuple[float, float]
    mean_s: tuple[float, float]
    ratio: float  # of the mean step
    interval: tuple[float, float]  # 95%
    chance: float  # that steps so different come from equal runs (Mann-Whitney)
    moved: dict[str, tuple[float, float]]  # state → seconds a step in A and in B, where they differ
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def direction(self) -> str:
        """slower, quicker, or the same as far as these steps can tell."""
        low, high = self.interval
        if self.chance < SURE and low > 1.0:
            return "slower"
        return "quicker" if self.chance < SURE and high < 1.0 else "the same"


def compare(a: Recording, b: Recording) -> Comparison:
    """What changed from run A to run B; refuses where one was too short to tell."""
    steps = _steps(a), _steps(b)
    for name, run, seen in zip("AB", (a, b), steps, strict=True):
        if len(seen) < FEWEST or not seen.any():
            raise BadInputError(
                f"{name} ({run.title}) has {counted(len(seen), 'step')} after its first {WARM_UP}: too few "
                "to compare",
                hint="record a longer run; `stoker diagnose RUN` explains one alone",
            )
    kinds = [{one.kind for one in judge(features(run)).findings} - {"healthy"} for run in (a, b)]
    low, high = _interval(*steps)
    return Comparison(
        median_s=(float(np.median(steps[0])), float(np.median(steps[1]))),
        mean_s=(float(steps[0].mean()), float(steps[1].mean())),
        ratio=float(steps[1].mean() / steps[0].mean()),
        interval=(low, high),
        chance=mann_whitney(*steps),
        moved=_moved(a, b),
        gone=tuple(sorted(kinds[0] - kinds[1])),
        new=tuple(sorted(kinds[1] - kinds[0])),
    )


def _steps(run: Recording) -> Floats:
    """Step by step the time of the slowest rank: it is what all of them wait for."""
    lengths = [np.diff(rank.steps.end, prepend=rank.steps.start[:1])[WARM_UP:] for rank in run.ranks]
    count = min((len(one) for one in lengths), default=0)
    return np.max([one[:count] for one in lengths], axis=0) if count else np.zeros(0)


def _interval(a: Floats, b: Floats) -> tuple[float, float]:
    """Where the ratio of mean steps lies, by drawing steps again and again. The same draws every time."""
    draw = np.random.default_rng(0)
    means = [_drawn_means(one, draw) for one in (a, b)]
    low, high = np.percentile(means[1] / means[0], [2.5, 97.5])
    return float(low), float(high)


def _drawn_means(steps: Floats, draw: np.random.Generator) -> Floats:
    """One draw after another: all at once take gigabytes of a run of a hundred thousand steps."""
    count = len(steps)
    return np.array([steps[draw.integers(0, count, count)].mean() for _ in range(DRAWS)])


def mann_whitney(a: Floats, b: Floats) -> float:
    """The chance that two equal runs differ so much in the order of their steps (two sides, normal)."""
    if len(a) < FEWEST or len(b) < FEWEST:
        return 1.0
    both = np.concatenate([a, b])
    _, where, counts = np.unique(both, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[where]
    size = len(both)
    u = float(ranks[: len(a)].sum()) - len(a) * (len(a) + 1) / 2
    ties = float((counts**3 - counts).sum()) / (size * (size - 1))
    spread = math.sqrt(len(a) * len(b) / 12 * (size + 1 - ties))
    if spread == 0:
        return 1.0
    return math.erfc(abs(u - len(a) * len(b) / 2) / spread / math.sqrt(2))


def _moved(a: Recording, b: Recording) -> dict[str, tuple[float, float]]:
    """Seconds a step in every state that changed by a notable part of a step."""
    spent = [_a_step(run) for run in (a, b)]
    usual = sum(spent[0].values())
    return {
        name: (spent[0][name], spent[1][name])
        for name in STATES
        if abs(spent[1][name] - spent[0][name]) >= NOTABLE * usual and name != "startup"
    }


def _a_step(run: Recording) -> dict[str, float]:
    seen = features(run)
    return {name: share * seen.judged_s / max(seen.loop.steps, 1) for name, share in seen.loop.share.items()}
