"""Number formatting for people, the same on every surface."""

from __future__ import annotations

import math

from stoker.formats.sizes import say_binary, three_digits

_UNKNOWN = "–"


def seconds(value: float) -> str:
    """12 µs, 61.2 ms, 4.29 s, 3 min 20 s, 2 h 05 min."""
    if not math.isfinite(value):
        return _UNKNOWN
    if value < 60:
        scale, unit = (
            (1.0, "s") if value >= 1 or value == 0 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
        )
        return f"{three_digits(value * scale)} {unit}"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min"


def percent(ratio: float) -> str:
    """Whole percents; what is there but small is not shown as nothing."""
    if not math.isfinite(ratio):
        return _UNKNOWN
    if 0 < ratio < 0.01:
        return "< 1%"
    if 0.99 < ratio < 1:
        return "> 99%"
    return f"{ratio:.0%}"


def amount(value: float, unit: str = "") -> str:
    """A number of things with k, M, G or T: 267k tokens/s, 21.3T FLOP/s."""
    if not math.isfinite(value):
        return _UNKNOWN
    scale, letter = next(
        (pair for pair in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(value) >= 10 * pair[0]),
        (1.0, ""),
    )
    return f"{three_digits(value / scale)}{letter} {unit}".rstrip()


def size(value: float) -> str:
    """Bytes in binary units: 140 GiB."""
    if not math.isfinite(value):
        return _UNKNOWN
    return say_binary(value)


def money(dollars: float) -> str:
    """$0.03, $12.40, $1,240; what is there but small is not shown as nothing."""
    if 0 < dollars < 0.005:
        return "< $0.01"
    return f"${dollars:,.0f}" if dollars >= 1000 else f"${dollars:,.2f}"


def times(factor: float) -> str:
    """1.9×."""
    return f"{factor:.1f}×" if factor < 10 else f"{factor:.0f}×"


def quantity(value: float, unit: str) -> str:
    """A reading in the base unit the metrics use, as a person says it."""
    if unit == "ratio":
        return percent(value)
    if unit == "seconds":
        return seconds(value)
    if unit == "bytes":
        return size(value)
    if unit == "bytes_per_second":
        return f"{size(value)}/s" if math.isfinite(value) else _UNKNOWN
    if unit == "hertz":
        return f"{value / 1e6:,.0f} MHz" if math.isfinite(value) else _UNKNOWN
    letter = {"watts": "W", "celsius": "°C"}.get(unit, unit)
    return f"{value:,.0f} {letter}" if math.isfinite(value) else _UNKNOWN


def words(name: str) -> str:
    """data_starvation as people write it."""
    return name.replace("_", " ")
