"""History page: small multiples in the report's design, changes marked, run and commit behind a dot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.formats.sizes import counted
from stoker.history.plot import commit_of, day, moved, said
from stoker.history.series import Regression, Series
from stoker.report.html import static_page
from stoker.report.page.markup import Html, join, tag
from stoker.storage import new_file

_WIDE, _HIGH, _LEFT, _EDGE = 420, 150, 64, 12
MOST = 60  # plots of one page: a browser draws them at once, and a reader looks at the first


def write_page(some: Sequence[Series], path: Path, *, bad: Sequence[Regression], title: str) -> None:
    """Write the page; the file appears whole or not at all."""
    with new_file(path) as file:
        file.write(history_page(some, bad=bad, title=title).encode())


def history_page(some: Sequence[Series], *, bad: Sequence[Regression], title: str) -> str:
    """Those that became worse first, then those that changed, then the quiet ones."""
    worse = {id(one.series) for one in bad}
    order = sorted(some, key=lambda one: (id(one) not in worse, not one.changes, one.case, one.name))
    parts = {
        "head": join(
            tag("p", "stoker history", class_="brand"),
            tag("h1", title),
            tag("p", f"{counted(len(some), 'figure')}; {_runs(some)}", class_="meta"),
        ),
        "verdict": _verdict(bad),
        "figures": tag("div", *(_figure(one) for one in order[:MOST]), class_="multiples"),
    }
    if len(order) > MOST:
        left = (
            f"Not shown: {counted(len(order) - MOST, 'figure')} more. Name some: stoker history show FIGURE."
        )
        parts["more"] = tag("p", left, class_="note")
    return static_page(title, parts)


def _runs(some: Sequence[Series]) -> str:
    entries = {entry.id: entry for one in some for entry in one.entries}
    if not entries:
        return "no runs"
    times = sorted(entry.at for entry in entries.values())
    return f"{counted(len(entries), 'run')} from {day(times[0])} to {day(times[-1])}"


def _verdict(bad: Sequence[Regression]) -> Html:
    if not bad:
        return tag("div", tag("h2", "Nothing became worse lately"), class_="card good")
    lines = [
        f"{one.series.title}: {one.series.name} {moved(one.change.before, one.change.after)} "
        f"since {day(one.first.at)}, commit {commit_of(one.first)} "
        f"(last good {commit_of(one.last_good)}); {one.series.machine}"
        for one in bad
    ]
    return tag(
        "div",
        tag("p", "became worse", class_="kind"),
        tag("h2", f"{counted(len(bad), 'figure')} became worse"),
        tag("ul", *(tag("li", line) for line in lines)),
        class_="card bad",
    )


def _figure(series: Series) -> Html:
    middle, low, high = series.spread()
    better = f"{series.better} is better" if series.better else "neither way is better"
    return tag(
        "figure",
        tag("figcaption", tag("b", series.name), tag("small", f"{series.title} · {series.machine}")),
        _plot(series),
        tag(
            "p",
            tag("b", said(middle, series.unit)),
            f" ({said(low, series.unit)}–{said(high, series.unit)}), "
            f"last 5 of {len(series.points)}; {better}",
            class_="spread",
        ),
        *(_change(series, number) for number in range(len(series.changes))),
    )


def _change(series: Series, number: int) -> Html:
    change, entry = series.changes[number], series.entries[series.changes[number].index]
    how = "worse" if series.is_worse(change) else "better" if series.better else "changed"
    text = f"{day(entry.at)} {commit_of(entry)}: {how}, {moved(change.before, change.after)}"
    return tag("p", text, class_=f"change {how}")


def _plot(series: Series) -> Html:
    """Dots from left to right in the order of time, a line for each level, a dashed one where it changes."""
    values = series.values
    low, high = min(values), max(values)
    room = (high - low) * 0.08 or abs(high) * 0.02 or 1.0
    low, high = low - room, high + room

    def x(index: float) -> float:
        return round(_LEFT + (_WIDE - _LEFT - _EDGE) * (index + 0.5) / len(values), 1)

    def y(value: float) -> float:
        return round(_EDGE + (_HIGH - 2 * _EDGE) * (high - value) / (high - low), 1)

    edges = [0, *(one.index for one in series.changes), len(values)]
    levels = [series.changes[0].before if series.changes else _median(values)]
    levels += [one.after for one in series.changes]
    drawn = [tag("path", class_="axis", d=f"M{_LEFT} {_EDGE}V{_HIGH - _EDGE}H{_WIDE - _EDGE}")]
    for start, end, level in zip(edges, edges[1:], levels, strict=False):
        drawn.append(tag("path", class_="level", d=f"M{x(start - 0.5)} {y(level)}H{x(end - 0.5)}"))
    for one in series.changes:
        how = "worse" if series.is_worse(one) else "better" if series.better else "changed"
        drawn.append(tag("path", class_=f"cut {how}", d=f"M{x(one.index - 0.5)} {_EDGE}V{_HIGH - _EDGE}"))
    for index, (entry, value) in enumerate(zip(series.entries, values, strict=True)):
        behind = (
            f"{said(value, series.unit)} · {day(entry.at)} · {commit_of(entry)} · {entry.run or entry.id}"
        )
        drawn.append(tag("circle", tag("title", behind), cx=x(index), cy=y(value), r=3))
    for value in {min(values), max(values)}:
        drawn.append(tag("text", _label(value, series.unit), x=_LEFT - 6, y=y(value) + 4, text_anchor="end"))
    return tag(
        "svg",
        tag(
            "title", f"{series.name}: {counted(len(values), 'run')}, {counted(len(series.changes), 'change')}"
        ),
        *drawn,
        class_="trend",
        viewBox=f"0 0 {_WIDE} {_HIGH}",
        role="img",
    )


def _label(value: float, unit: str) -> str:
    """Short enough to stand beside an axis: units of many letters are named below the plot."""
    return said(value, unit) if unit in ("s", "ratio") else said(value, "")


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2]
