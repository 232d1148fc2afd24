"""Series: one figure of one case on one kind of machine, over time; its changes and regressions."""

from __future__ import annotations

import fnmatch
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from stoker.history.changes import RECENT, SURE, Change, find_changes
from stoker.history.figures import HIGHER, LOWER, Entry, Figure

LAST = 5  # runs that a spread looks back on, as README's tables do
ENOUGH = 8  # runs below which nothing can be told apart from noise


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """Points are in the order of time."""

    name: str
    unit: str
    better: str
    case: str
    title: str
    machine: str
    entries: tuple[Entry, ...]
    points: tuple[Figure, ...]
    changes: tuple[Change, ...] = ()

    @property
    def values(self) -> list[float]:
        return [one.value for one in self.points]

    def spread(self, last: int = LAST) -> tuple[float, float, float]:
        """Median, lowest and highest of the last runs."""
        newest = self.values[-last:]
        return statistics.median(newest), min(newest), max(newest)

    def is_worse(self, change: Change) -> bool:
        if self.better == HIGHER:
            return change.after < change.before
        return self.better == LOWER and change.after > change.before


@dataclass(frozen=True, kw_only=True, slots=True)
class Regression:
    """A change for the worse among the newest runs."""

    series: Series
    change: Change

    @property
    def first(self) -> Entry:
        """The first run on the worse level."""
        return self.series.entries[self.change.index]

    @property
    def last_good(self) -> Entry:
        return self.series.entries[self.change.index - 1]


def all_series(entries: Sequence[Entry], *, pattern: str = "*", dirty: bool = True) -> list[Series]:
    """Every figure whose name, or `title: name`, fits the pattern. Machines are never mixed."""
    found: dict[tuple[str, str, str], list[tuple[Entry, Figure]]] = {}
    for entry in sorted(entries, key=lambda one: one.at):
        if dirty or not entry.origin.dirty:
            for figure in entry.figures:
                if fits(pattern, entry.title, figure.name):
                    found.setdefault((entry.case, figure.name, entry.origin.machine), []).append(
                        (entry, figure)
                    )
    return [_series(key, rows) for key, rows in sorted(found.items())]


def fits(pattern: str, title: str, name: str) -> bool:
    """As in a shell, without regard to case; a word without * is looked for anywhere."""
    wanted = pattern.lower() if set(pattern) & set("*?[") else f"*{pattern.lower()}*"
    said = (name.lower(), f"{title}: {name}".lower(), f"{title}/{name}".lower())
    return any(fnmatch.fnmatchcase(one, wanted) for one in said) or pattern.lower() in said


def _series(key: tuple[str, str, str], rows: Sequence[tuple[Entry, Figure]]) -> Series:
    case, name, machine = key
    newest, points = rows[-1][1], tuple(figure for _, figure in rows)
    return Series(
        name=name,
        unit=newest.unit,
        better=newest.better,
        case=case,
        title=rows[-1][0].title,
        machine=machine,
        entries=tuple(entry for entry, _ in rows),
        points=points,
        changes=tuple(find_changes([one.value for one in points])) if len(rows) >= ENOUGH else (),
    )


def regressions(some: Sequence[Series], *, recent: int = RECENT) -> list[Regression]:
    """The last change of each series, if it is for the worse, recent, and sure among so many series
    (Benjamini and Hochberg: of what is named, less than SURE is expected to be chance)."""
    candidates = [
        Regression(series=one, change=one.changes[-1])
        for one in some
        if one.changes and one.is_worse(one.changes[-1]) and one.changes[-1].index >= len(one.points) - recent
    ]
    candidates.sort(key=lambda one: one.change.chance)
    tested = max(1, sum(len(one.points) >= ENOUGH and bool(one.better) for one in some))
    passed = [n for n, one in enumerate(candidates, 1) if one.change.chance <= SURE * n / tested]
    return candidates[: max(passed, default=0)]
