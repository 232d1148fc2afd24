"""Downsampling: a reading over time, thinned to what a plot can show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.recording import Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Mean, lowest and highest reading of each stretch of time that has one; unknown never enters."""

    name: str
    unit: str
    t: Floats
    mean: Floats
    low: Floats
    high: Floats
    average: float  # over all readings, not over the stretches
    last: float


def bin_edges(wall_s: float, bins: int) -> Floats:
    """The borders of equal stretches of a run."""
    return np.linspace(0.0, max(wall_s, 1e-9), bins + 1)


def series_of(name: str, *, unit: str, t: Floats, values: Floats, edges: Floats) -> Series:
    """Thin readings: a stretch keeps its extremes, so that a spike stays visible."""
    known = np.isfinite(values)
    t, values = t[known], values[known]
    place = np.clip(np.searchsorted(edges, t, side="right") - 1, 0, len(edges) - 2)
    first = np.flatnonzero(np.diff(place, prepend=-1))
    count = np.diff(first, append=len(place))
    if not len(values):
        return Series(name=name, unit=unit, t=t, mean=t, low=t, high=t, average=math.nan, last=math.nan)
    return Series(
        name=name,
        unit=unit,
        t=np.add.reduceat(t, first) / count,
        mean=np.add.reduceat(values, first) / count,
        low=np.minimum.reduceat(values, first),
        high=np.maximum.reduceat(values, first),
        average=float(values.mean()),
        last=float(values[-1]),
    )


def combined(given: Sequence[Series]) -> Series | None:
    """Several devices' readings as one: the mean of their means, between the lowest and the highest."""
    present = [series for series in given if len(series.t)]
    if len(present) < 2:
        return present[0] if present else None
    t = max((series.t for series in present), key=len)
    return Series(
        name=present[0].name,
        unit=present[0].unit,
        t=t,
        mean=np.mean([np.interp(t, series.t, series.mean) for series in present], axis=0),
        low=np.min([np.interp(t, series.t, series.low) for series in present], axis=0),
        high=np.max([np.interp(t, series.t, series.high) for series in present], axis=0),
        average=float(np.mean([series.average for series in present])),
        last=float(np.mean([series.last for series in present])),
    )
