"""Step times and throughput, of a rank and of the whole job."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.recording import Floats, Steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """Finished steps in numbers; unknown is NaN."""

    count: int = 0
    median_s: float = math.nan
    p95_s: float = math.nan
    slowest_s: float = math.nan
    last_t: float = math.nan  # when the last step ended, in seconds of the run
    tokens_per_s: float = math.nan
    flops_per_s: float = math.nan


def pace_of_rank(steps: Steps) -> Pace:
    """One rank's pace; rates are over the time from its first step to its last."""
    if not len(steps.end):
        return Pace()
    took = steps.end - steps.start
    span_s = float(steps.end[-1] - steps.start[0]) or math.nan
    return Pace(
        count=len(took),
        median_s=float(np.median(took)),
        p95_s=float(np.quantile(took, 0.95)),
        slowest_s=float(took.max()),
        last_t=float(steps.end[-1]),
        tokens_per_s=_sum(steps.tokens) / span_s,
        flops_per_s=_sum(steps.flops) / span_s,
    )


def pace_of_job(ranks: Sequence[Pace]) -> Pace:
    """Ranks step together: the slowest of them speaks for step times, their rates add up."""
    stepped = [rank for rank in ranks if rank.count]
    if not stepped:
        return Pace()
    slowest = max(stepped, key=lambda rank: (rank.count, rank.median_s))
    return Pace(
        count=slowest.count,
        median_s=slowest.median_s,
        p95_s=slowest.p95_s,
        slowest_s=slowest.slowest_s,
        last_t=max(rank.last_t for rank in stepped),
        tokens_per_s=_sum([rank.tokens_per_s for rank in stepped]),
        flops_per_s=_sum([rank.flops_per_s for rank in stepped]),
    )


def _sum(values: Floats | Sequence[float]) -> float:
    """A sum that leaves out what is unknown, and is unknown where everything is."""
    known = np.asarray(values, dtype=np.float64)
    return float(np.nansum(known)) if np.isfinite(known).any() else math.nan
