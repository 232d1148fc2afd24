"""HTML plan: one page that needs nothing else, tables, and plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from stoker.plan.arithmetic import Plan
from stoker.plan.scene import Course, Floats
from stoker.plan.text import course_rows, rows_of
from stoker.report.html import static_page
from stoker.report.page.markup import Html, join, tag
from stoker.report.page.ticks import round_times, tick
from stoker.report.phrases import sentence

# Okabe and Ito's colours, which most colour-blind readers tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 720, 300, 56, 30, 48
_APART = 46  # pixels between the middles of two labels


def plan_page(plan: Plan, courses: Sequence[Course] = (), sweeps: Sequence[Sequence[Course]] = ()) -> str:
    """The whole page, in the report's design."""
    (title, first), *rest = rows_of(plan)
    parts = {
        "head": join(tag("p", "stoker plan", class_="brand"), tag("h1", title)),
        "verdict": _notes("What to mind", plan.notes) if plan.notes else Html(),
        "reading": _section("the job", first) if first else Html(),
        **{name.replace(" ", "-"): _section(name, rows) for name, rows in rest},
    }
    if courses:
        drawn = tag("div", Html(idle_over_time(courses)), class_="scroll")
        parts["simulated"] = join(_section("simulated", course_rows(courses)), drawn)
    if sweeps:
        parts["by-nodes"] = join(tag("h2", "By number of nodes"), Html(idle_by_nodes(sweeps)))
    if plan.unknown:
        parts["unknown"] = join(tag("h2", "Not known, so not planned"), _list(plan.unknown))
    return static_page(f"plan: {plan.job.name}", parts)


def _notes(title: str, notes: Sequence[str]) -> Html:
    return tag("div", tag("p", title, class_="kind"), _list(notes), class_="card bad")


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Html:
    cells = [tag("tr", tag("th", name), tag("td", value)) for name, value in rows]
    return join(tag("h2", sentence(title)), tag("table", tag("tbody", *cells), class_="facts"))


def _list(lines: Sequence[str]) -> Html:
    return tag("ul", *(tag("li", line) for line in lines))


def idle_over_time(courses: Sequence[Course], *, until: float = math.inf) -> str:
    """GPU idle share over time, a line for each policy."""
    end = min(until, max(course.seconds for course in courses))
    lines = {course.policy.name: _thinned(course, end=end) for course in courses}
    ticks = [(at, tick(at)) for at in round_times(end)]
    return plot(
        lines, right=end, ticks=ticks, across="time since the start", title="GPU idle share over time"
    )


def idle_by_nodes(sweeps: Sequence[Sequence[Course]]) -> str:
    """GPU idle share of the first epochs against the number of nodes, on a logarithmic axis."""
    lines = {
        sweep[0].policy.name: (
            np.log10([course.cluster.nodes for course in sweep]),
            np.array([course.idle_share for course in sweep]),
        )
        for sweep in sweeps
    }
    counts = [course.cluster.nodes for course in sweeps[0]]
    ticks = [(float(np.log10(count)), f"{count:,}") for count in counts]
    own = [one for one in ticks if one[0] % 1]  # the job's own number; powers of ten give way to it
    kept = _apart([*own, *(one for one in reversed(ticks) if one not in own)], ticks[-1][0])
    return plot(
        lines,
        right=ticks[-1][0],
        ticks=kept,
        across="nodes (logarithmic)",
        title="GPU idle share by number of nodes",
    )


def _apart(ticks: Sequence[tuple[float, str]], right: float) -> list[tuple[float, str]]:
    """Those whose labels do not touch one that was kept before."""
    kept: list[tuple[float, str]] = []
    for at, label in ticks:
        if all(abs(_x(at, right) - _x(other, right)) >= _APART for other, _ in kept):
            kept.append((at, label))
    return kept


def plot(
    lines: dict[str, tuple[Floats, Floats]],
    *,
    right: float,
    ticks: Sequence[tuple[float, str]],
    across: str,
    title: str,
) -> str:
    """Shares between 0 and 1 as lines, each named beside it in the legend."""
    high = _HEIGHT + 10 + 22 * len(lines)
    drawn = [_axis(ticks, right, across)]
    for number, (name, (x, y)) in enumerate(lines.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = " ".join(f"{_x(a, right):.1f},{_y(b):.1f}" for a, b in zip(x, y, strict=True))
        at = _HEIGHT + 24 + 22 * number
        drawn.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        drawn.append(f'<rect x="{_LEFT}" y="{at - 9}" width="14" height="4" fill="{colour}"/>')
        drawn.append(f'<text x="{_LEFT + 22}" y="{at - 3}">{escape(name)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {high}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui,sans-serif" font-size="12" fill="#767676">'
        f"<title>{escape(title)}</title>{''.join(drawn)}</svg>"
    )


def _axis(ticks: Sequence[tuple[float, str]], right: float, across: str) -> str:
    rows = [
        f'<line x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{_y(share):.1f}" y2="{_y(share):.1f}" stroke="#8884"/>'
        f'<text x="{_LEFT - 8}" y="{_y(share) + 4:.1f}" text-anchor="end">{share:.0%}</text>'
        for share in (0, 0.25, 0.5, 0.75, 1)
    ]
    columns = [
        f'<text x="{_x(at, right):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="{_anchor(at, right)}">'
        f"{escape(label)}</text>"
        for at, label in ticks
    ]
    middle = (_LEFT + _WIDTH - 10) / 2
    titles = [
        '<text x="0" y="14">GPU idle share</text>',
        f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{escape(across)}</text>',
    ]
    return "".join([*rows, *columns, *titles])


def _anchor(at: float, right: float) -> str:
    return "end" if at >= 0.97 * right else "start" if at <= 0 else "middle"


def _x(value: float, right: float) -> float:
    return _LEFT + (_WIDTH - 10 - _LEFT) * float(value) / max(right, 1e-9)


def _y(share: float) -> float:
    return _TOP + (_HEIGHT - _BOTTOM - _TOP) * (1 - min(1.0, max(0.0, float(share))))


def _thinned(course: Course, *, end: float, points: int = 120) -> tuple[Floats, Floats]:
    """Means over equal pieces of time: a line of a few hundred points shows what thousands would."""
    edges = np.linspace(0, min(end, course.seconds), points + 1)
    lost = np.concatenate([[0.0], np.cumsum(course.idle.sum(axis=0) * np.diff(course.t, prepend=0.0))])
    at = np.interp(edges, np.concatenate([[0.0], course.t]), lost)
    return edges[1:], np.diff(at) / np.diff(edges)
