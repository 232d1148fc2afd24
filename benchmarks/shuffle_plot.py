"""The plot of `docs/concepts/order.md`: what is where in an epoch, and measures beside true permutations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

_STYLE = "font-family:sans-serif;font-size:12px;fill:#333"
_SIZE, _LEFT, _TOP = 230, 50, 46


def draw_plot(rows: list[dict], path: Path, *, old: Callable, new: Callable) -> None:
    """Three squares, place in a batch against place in the corpus; below them dots of measures."""
    rng = np.random.default_rng(0)
    squares = {
        "fixed lanes (before)": old(1, 0, 0)[0],
        "stoker": new(1, 0, 0)[0],
        "true permutation": rng.permutation(len(new(1, 0, 0)[0])),
    }
    parts = [_square(number, name, order) for number, (name, order) in enumerate(squares.items())]
    parts += _measures([row for row in rows if (row["ranks"], row["batch"]) == (1, 8)])
    body = "\n".join(parts)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="850" height="610" style="{_STYLE}">\n'
        f'<rect width="850" height="610" fill="white"/>\n{body}\n</svg>\n'
    )


def _square(number: int, name: str, order: np.ndarray) -> str:
    """Each dot is a sample: across, its row in batches of 24; up, where it lies in the corpus."""
    left, batch = _LEFT + number * (_SIZE + 30), 24
    some = order[: len(order) // batch * batch].reshape(-1, batch)[:: len(order) // batch // 60]
    dots = "".join(
        f'<circle cx="{left + (row + 0.5) / batch * _SIZE:.1f}" '
        f'cy="{_TOP + _SIZE - sample / len(order) * _SIZE:.1f}" r="1.1"/>'
        for one in some
        for row, sample in enumerate(one.tolist())
    )
    return (
        f'<text x="{left}" y="{_TOP - 10}" font-weight="bold">{name}</text>'
        f'<rect x="{left}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#bbb"/>'
        f'<g fill="#2563a8" fill-opacity="0.55">{dots}</g>'
        f'<text x="{left}" y="{_TOP + _SIZE + 16}">row of a batch of 24 → (↑ place in the corpus)</text>'
    )


_SHOWN = {  # what is shown, its name, and the range of its axis
    "correlation": ("correlation across epochs and seeds", (-0.1, 1.0)),
    "neighbour_distance": ("distance of neighbours (share of the corpus)", (0.0, 0.6)),
    "by_row": ("chi-square of parts by row, per freedom (log)", (-0.5, 4.0)),
    "evenness": ("pairs of one part in a batch, against chance", (0.0, 3.0)),
}


def _measures(rows: list[dict]) -> list[str]:
    """A line for each order, a column for each measure; the grey band is what true permutations have."""
    top, found = _TOP + _SIZE + 60, []
    true = next(row for row in rows if row["order"] == "true permutation")
    for column, (name, (title, (low, high))) in enumerate(_SHOWN.items()):
        left, width = 210 + column * 158, 140

        def at(
            value: float, left: int = left, width: int = width, low: float = low, high: float = high
        ) -> float:
            return left + (min(max(value, low), high) - low) / (high - low) * width

        scale = np.log10 if name == "by_row" else float
        first, last = at(scale(min(true[name]))), at(scale(max(true[name])))
        words = title.split()
        half = len(words) // 2
        found.append(f'<text x="{left}" y="{top - 16}" font-size="10">{" ".join(words[:half])}</text>')
        found.append(f'<text x="{left}" y="{top - 4}" font-size="10">{" ".join(words[half:])}</text>')
        found.append(
            f'<rect x="{first - 1:.1f}" y="{top}" width="{last - first + 2:.1f}" '
            f'height="{24 * len(rows)}" fill="#ddd"/>'
        )
        for line, row in enumerate(rows):
            marks = (
                f"{at(scale(max(value, 1e-3))) if name == 'by_row' else at(value):.1f}" for value in row[name]
            )
            y = top + 12 + 24 * line
            found += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="#c0392b" fill-opacity="0.6"/>' for x in marks]
    for line, row in enumerate(rows):
        found.append(f'<text x="16" y="{top + 16 + 24 * line}">{row["order"]}</text>')
    return found
