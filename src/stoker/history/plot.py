"""Terminal plots: a series as a small picture of text, its changes marked; and the list of what is there."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

from stoker.formats.sizes import counted, three_digits
from stoker.history.figures import Entry
from stoker.history.series import Series
from stoker.report.units import amount, percent, seconds, size

_HIGH = 8  # lines of a plot
_COLUMNS = 64


def said(value: float, unit: str) -> str:
    """A figure for people, in its unit."""
    if unit == "s":
        return seconds(value) if value >= 0 else f"-{seconds(-value)}"
    if unit == "ratio" and 0 <= value <= 1:
        return percent(value) if value >= 0.1 else f"{value:.2%}"
    if unit == "B/s":
        return f"{size(value)}/s"
    if unit in ("B", "bytes"):
        return size(value)
    return amount(value, unit) if abs(value) >= 1e4 else f"{three_digits(value)} {unit}".rstrip()


def moved(before: float, after: float) -> str:
    """By how much: of nothing, or less, there is no share."""
    return f"{after / before - 1:+.1%}" if before > 0 else f"{after - before:+.3g}"


def series_lines(series: Series, *, columns: int = _COLUMNS) -> list[str]:
    """Its name, the plot, its spread over the last runs, its changes with their commits."""
    middle, low, high = series.spread()
    better = f", {series.better} is better" if series.better else ""
    newest = counted(min(5, len(series.points)), "newest run")
    lines = [
        f"{series.title}: {series.name}{better}",
        f"  {series.machine}; {counted(len(series.points), 'run')}",
        *(f"  {line}" for line in _plot(series, columns)),
        f"  median {said(middle, series.unit)} ({said(low, series.unit)}–{said(high, series.unit)}), "
        f"{newest}",
    ]
    for change in series.changes:
        entry = series.entries[change.index]
        worse = "worse" if series.is_worse(change) else "better" if series.better else "changed"
        lines.append(
            f"  ▲ {day(entry.at)} {commit_of(entry)}: {worse}, {said(change.before, series.unit)} → "
            f"{said(change.after, series.unit)} ({moved(change.before, change.after)}, "
            f"chance {change.chance:.1g})"
        )
    return lines


def _plot(series: Series, columns: int) -> list[str]:
    """Dots by their order, of many runs the median of neighbours; below, ▲ where a level changes."""
    values = series.values
    each = -(-len(values) // columns)
    shown = [statistics.median(values[at : at + each]) for at in range(0, len(values), each)]
    low, high = min(shown), max(shown)
    rows = [[" "] * len(shown) for _ in range(_HIGH)]
    for column, value in enumerate(shown):
        row = round((value - low) / (high - low) * (_HIGH - 1)) if high > low else _HIGH // 2
        rows[_HIGH - 1 - row][column] = "●"
    marks = [" "] * len(shown)
    for change in series.changes:
        marks[change.index // each] = "▲"
    labels = {0: said(high, series.unit), _HIGH - 1: said(low, series.unit)}
    wide = max(map(len, labels.values()))
    drawn = [f"{labels.get(number, ''):>{wide}} ┤{''.join(row)}" for number, row in enumerate(rows)]
    return [*drawn, f"{'':>{wide}}  {''.join(marks)}".rstrip()] if series.changes else drawn


def entry_lines(entries: Sequence[Entry], *, most: int) -> list[str]:
    """The newest runs, one a line."""
    lines = [f"{'when':16}  {'kind':9}  {'commit':9}  what"]
    for entry in entries[-most:]:
        figures = "; ".join(f"{one.name} {said(one.value, one.unit)}" for one in entry.figures[:3])
        lines.append(f"{day(entry.at)}  {entry.kind:9}  {commit_of(entry):9}  {entry.title}: {figures}")
    if len(entries) > most:
        lines.append(f"({counted(len(entries) - most, 'older run')} not shown: --all)")
    return lines


def day(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


def commit_of(entry: Entry) -> str:
    return f"{entry.origin.commit[:7]}{'+' if entry.origin.dirty else ''}" or "–"
