"""Axis ticks at round numbers: times a clock shows, ceilings a reader can halve in the head."""

from __future__ import annotations

import math

from stoker.report.units import seconds

_MOST = 6
_CLOCK = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)


def round_times(end_s: float, *, most: int = _MOST) -> list[float]:
    """Zero and the round times up to the end, at most `most` after zero."""
    if not 0 < end_s < math.inf:
        return [0.0]
    step = _step(end_s / most)
    return [number * step for number in range(math.floor(end_s / step * (1 + 1e-9)) + 1)]


def tick(time_s: float) -> str:
    """As short as it goes: 0, 250 ms, 45 s, 5 min, 2 h."""
    for unit_s, unit in ((3600, "h"), (60, "min")):
        if time_s >= unit_s and time_s % unit_s == 0:
            return f"{time_s / unit_s:,.0f} {unit}"
    return seconds(time_s) if time_s else "0"


def round_up(value: float, unit: str = "") -> float:
    """1, 1.5, 2, 3, 5 or 8 times a power of ten, of the unit in which bytes are said."""
    if value <= 0:
        return 1.0
    scale = 1024.0 ** max(0, math.floor(math.log(value, 1024))) if unit.startswith("bytes") else 1.0
    power = scale * 10.0 ** math.floor(math.log10(value / scale))
    return next((step * power for step in (1, 1.5, 2, 3, 5, 8) if step * power >= value * 0.9999), 10 * power)


def _step(least: float) -> float:
    if least > _CLOCK[-1]:
        return _CLOCK[-1] * math.ceil(least / _CLOCK[-1])
    if least >= 1:
        return next(step for step in _CLOCK if step >= least)
    power = 10.0 ** math.floor(math.log10(least))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least * (1 - 1e-9))
