"""A plan as one HTML page that needs nothing else: tables, and plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import numpy as np

from stoker.plan.arithmetic import Plan, say_time
from stoker.plan.scene import Course, Floats
from stoker.plan.text import course_rows, rows_of

# Okabe and Ito's colours, which most colour-blind readers tell apart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 260, 52, 36

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
body{color:#222;background:#fff}h2{font-size:1.05rem;margin:1.5rem 0 .3rem}li{margin:.3rem 0}
table{border-collapse:collapse;margin-bottom:1.5rem}td{padding:.2rem 1.2rem .2rem 0;vertical-align:top}
td:first-child{color:#666;white-space:nowrap}svg{max-width:100%;height:auto}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td:first-child{color:#999}}
"""


def plan_page(plan: Plan, courses: Sequence[Course] = (), sweeps: Sequence[Sequence[Course]] = ()) -> str:
    """The whole page."""
    parts = [f"<h1>{escape(plan.job.name)}</h1>"]
    if plan.notes:
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in plan.notes) + "</ul>")
    parts += [f"<h2>{escape(title)}</h2>{_table(rows)}" for title, rows in rows_of(plan)]
    if courses:
        parts.append(f"<h2>simulated</h2>{_table(course_rows(courses))}{idle_over_time(courses)}")
    if sweeps:
        parts.append(f"<h2>by number of nodes</h2>{idle_by_nodes(sweeps)}")
    if plan.unknown:
        parts.append(
            "<h2>not known</h2><ul>" + "".join(f"<li>{escape(x)}</li>" for x in plan.unknown) + "</ul>"
        )
    title = escape(f"stoker plan: {plan.job.name}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )


def idle_over_time(courses: Sequence[Course], *, until: float = math.inf) -> str:
    """GPU idle share over time, a line for each policy."""
    end = min(until, max(course.seconds for course in courses))
    lines = {course.policy.name: _thinned(course, end=end) for course in courses}
    ticks = [(end * part / 4, say_time(end * part / 4)) for part in range(1, 5)]
    return plot(lines, right=end, ticks=ticks, across="time", title="GPU idle share over time")


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
    return plot(
        lines, right=ticks[-1][0], ticks=ticks, across="nodes", title="GPU idle share by number of nodes"
    )


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
        f'<text x="{_x(at, right):.1f}" y="{_HEIGHT - 16}" text-anchor="{_anchor(at, right)}">'
        f"{escape(label)}</text>"
        for at, label in ticks
    ]
    return "".join(rows + columns) + f'<text x="{_LEFT}" y="{_HEIGHT - 1}">{escape(across)}</text>'


def _anchor(at: float, right: float) -> str:
    return "end" if at >= right else "middle"


def _x(value: float, right: float) -> float:
    return _LEFT + (_WIDTH - 10 - _LEFT) * float(value) / max(right, 1e-9)


def _y(share: float) -> float:
    return 10 + (_HEIGHT - _BOTTOM - 10) * (1 - min(1.0, max(0.0, float(share))))


def _thinned(course: Course, *, end: float, points: int = 120) -> tuple[Floats, Floats]:
    """Means over equal pieces of time: a line of a few hundred points shows what thousands would."""
    edges = np.linspace(0, min(end, course.seconds), points + 1)
    lost = np.concatenate([[0.0], np.cumsum(course.idle.sum(axis=0) * np.diff(course.t, prepend=0.0))])
    at = np.interp(edges, np.concatenate([[0.0], course.t]), lost)
    return edges[1:], np.diff(at) / np.diff(edges)


def _table(rows: Sequence[tuple[str, str]]) -> str:
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"
