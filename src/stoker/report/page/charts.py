"""SVG charts: stretched to any width, their labels beside them as text.

A path's numbers lie on a grid of WIDTH × HEIGHT; the page's script reads values back from it when a
reader points at a plot, so no number is in the page twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.timeline import STATES
from stoker.recording import Floats
from stoker.report.page.markup import Html, join, tag
from stoker.report.page.ticks import round_times, round_up, tick
from stoker.report.series import Series
from stoker.report.summary import Shares
from stoker.report.units import percent, quantity, words

WIDTH, HEIGHT = 2000, 500


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series with the name and the colour (a class of the style sheet) it is drawn with."""

    name: str
    colour: str
    series: Series
    gap_s: float = math.inf  # a silence that breaks the line


def bar(state_s: Sequence[float], *, title: str) -> Html:
    """One horizontal bar of states; the style sheet hides names that do not fit."""
    total = sum(state_s) or 1.0
    pieces = [
        tag(
            "span",
            tag("b", words(state)),
            class_=f"piece s-{state}",
            style=f"width:{value / total * 100:.3f}%",
            title=f"{words(state)} {percent(value / total)}",
        )
        for state, value in zip(STATES, state_s, strict=True)
        if value / total > 0.0005
    ]
    said = ", ".join(f"{words(s)} {percent(v / total)}" for s, v in zip(STATES, state_s, strict=True) if v)
    return tag("div", *pieces, class_="bar", role="img", aria_label=f"{title}: {said}")


def stack(over_time: Shares, *, wall_s: float) -> Html:
    """Shares of time by state over the run, one area each."""
    tops = np.vstack([np.zeros(over_time.share.shape[1]), np.cumsum(over_time.share, axis=0)])
    x = np.rint(over_time.edges / over_time.edges[-1] * WIDTH).astype(int)
    areas = [
        tag("path", class_=f"s-{state}", d=_area(x, tops[i], tops[i + 1]), data_name=words(state))
        for i, state in enumerate(STATES)
        if over_time.share[i].any()
    ]
    # The script reads these: whole percents, a column per stretch of time, a row per state that is there.
    rows = ";".join(
        ",".join(map(str, np.rint(over_time.share[i] * 100).astype(int)))
        for i in range(len(STATES))
        if over_time.share[i].any()
    )
    svg = _svg(*areas, title="States over time, in shares of all ranks' time")
    return _framed(svg, top="100%", bottom="0%", wall_s=wall_s, kind="stack", rows=rows)


def lines(
    given: Sequence[Line],
    *,
    unit: str,
    wall_s: float,
    title: str,
    top: float = math.nan,
    limit: float = math.nan,
) -> Html:
    """Lines over time with bands from lowest to highest, from zero to `top` (or a round number above all)."""
    if not given:
        return tag("p", "Not read.", class_="note")
    highest = max((float(line.series.high.max()) for line in given if len(line.series.high)), default=0.0)
    ceiling = (
        top if math.isfinite(top) else round_up(max(highest, limit if math.isfinite(limit) else 0.0), unit)
    )
    drawn: list[Html] = []
    for line in given:
        series = line.series
        x, y = _x(series.t, wall_s), _y(series.mean, ceiling)
        drawn.append(tag("path", class_=f"band c-{line.colour}", d=_band(x, series, ceiling)))
        drawn.append(
            tag(
                "path",
                class_=f"line c-{line.colour}",
                d=_path(x, y, gap=line.gap_s / max(wall_s, 1e-9) * WIDTH),
                data_name=line.name,
            )
        )
    if math.isfinite(limit):
        at = int(_y(np.array([limit]), ceiling)[0])
        drawn.append(tag("path", class_="limit", d=f"M0 {at}H{WIDTH}"))
    said = ", ".join(f"{line.name} {quantity(line.series.average, unit)} on average" for line in given)
    return join(
        _key(given, unit=unit, limit=limit),
        _framed(
            _svg(*drawn, title=f"{title}: {said}"),
            top=quantity(ceiling, unit),
            bottom="0",
            wall_s=wall_s,
            kind="lines",
            unit=unit,
            max=f"{ceiling:.6g}",
        ),
    )


def spark(series: Series | None, *, wall_s: float, colour: str, ceiling: float) -> Html:
    """A line the size of a word."""
    if series is None or not len(series.t):
        return Html("–")
    path = _path(_x(series.t, wall_s), _y(series.mean, ceiling), gap=math.inf)
    return tag(
        "svg",
        tag("path", class_=f"line c-{colour}", d=path),
        class_="spark",
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        aria_hidden="true",
    )


# --- the parts of a plot --------------------------------------------------------------------------


def _key(given: Sequence[Line], *, unit: str, limit: float) -> Html:
    """Names and means beside their colours."""
    entries = [
        tag(
            "li",
            tag("i", class_=f"swatch c-{line.colour}"),
            f"{line.name} ",
            tag("b", quantity(line.series.average, unit)),
        )
        for line in given
    ]
    if math.isfinite(limit):
        entries.append(tag("li", tag("i", class_="swatch limit"), "limit ", tag("b", quantity(limit, unit))))
    return tag("ul", *entries, class_="key")


def _framed(svg: Html, *, top: str, bottom: str, wall_s: float, **data: str) -> Html:
    scale = tag("div", tag("span", top), tag("span", bottom), class_="scale", aria_hidden="true")
    at = [(time_s, 100 * time_s / max(wall_s, 1e-9)) for time_s in round_times(wall_s)]
    ticks = [
        tag("span", tick(time_s), style=f"left:{left:.4g}%", class_="end" if left > 94 else None)
        for time_s, left in at
    ]
    return tag(
        "div",
        scale,
        tag("div", svg, class_="canvas"),
        tag("div", *ticks, class_="ticks", aria_hidden="true"),
        class_="plot",
        data_wall=f"{wall_s:.6g}",
        **{f"data_{name}": value for name, value in data.items()},
    )


def _svg(*parts: Html, title: str) -> Html:
    grid = "".join(f"M0 {HEIGHT * part // 4}H{WIDTH}" for part in (1, 2, 3))
    return tag(
        "svg",
        tag("title", title),
        *parts,
        tag("path", class_="grid", d=grid),
        viewBox=f"0 0 {WIDTH} {HEIGHT}",
        preserveAspectRatio="none",
        role="img",
    )


def _x(t: Floats, wall_s: float) -> Floats:
    return np.rint(t / max(wall_s, 1e-9) * WIDTH)


def _y(values: Floats, ceiling: float) -> Floats:
    return np.rint(HEIGHT * (1 - np.clip(values / (ceiling or 1.0), 0, 1)))


def _path(x: Floats, y: Floats, *, gap: float) -> str:
    if not len(x):
        return ""
    letters = ["M", *("M" if step > gap else "L" for step in np.diff(x))]
    return "".join(f"{letter}{int(a)} {int(b)}" for letter, a, b in zip(letters, x, y, strict=True))


def _band(x: Floats, series: Series, ceiling: float) -> str:
    if not len(x) or np.array_equal(series.low, series.high):
        return ""
    there = zip(x, _y(series.high, ceiling), strict=True)
    back = zip(x[::-1], _y(series.low, ceiling)[::-1], strict=True)
    return "M" + "L".join(f"{int(a)} {int(b)}" for a, b in [*there, *back]) + "Z"


def _area(x: Floats, below: Floats, above: Floats) -> str:
    """Columns from `below` to `above`, as one path that goes there on top and back at the bottom."""
    high, low = np.rint(HEIGHT * (1 - above)).astype(int), np.rint(HEIGHT * (1 - below)).astype(int)
    there = "".join(f"V{top}H{right}" for top, right in zip(high, x[1:], strict=True))
    back = "".join(f"V{bottom}H{left}" for bottom, left in zip(low[::-1], x[-2::-1], strict=True))
    return f"M{x[0]} {low[0]}{there}{back}Z"
