"""A branch beside another: the figures that both have, on machines that both ran on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stoker.diagnose.compare import FEWEST, SURE, mann_whitney
from stoker.errors import UsageError
from stoker.history.figures import Entry
from stoker.history.origin import git
from stoker.history.series import Series, all_series

RUNS = 20  # of each side, the newest: older ones measured older code


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure of both sides. `chance` is NaN where too few runs were made to tell."""

    series: Series
    before: tuple[float, ...]
    after: tuple[float, ...]
    chance: float

    @property
    def ratio(self) -> float:
        middle = statistics.median(self.before)
        return statistics.median(self.after) / middle if middle else math.nan

    @property
    def verdict(self) -> str:
        """better, worse, changed, the same, or that nobody can tell."""
        if math.isnan(self.chance):
            return "too few runs to tell"
        if self.chance >= SURE:
            return "the same"
        if not self.series.better:
            return "changed"
        # not by the ratio: from nothing it is none, and below nothing it points the other way
        before, after = statistics.median(self.before), statistics.median(self.after)
        if before == after:
            return "the same"
        rose = after > before
        return "better" if rose == (self.series.better == "higher") else "worse"


def compare(entries: Sequence[Entry], which: str, *, repository: Path, pattern: str = "*") -> list[Row]:
    """`main..branch`: runs of the branch's own commits against runs of what it left."""
    before, _, after = which.partition("..")
    if not before or not after or after.startswith("."):
        raise UsageError(f"{which!r} names no two sides", hint="as git says it: main..branch")
    is_after = _side(repository, f"{before}..{after}", after)
    is_before = _side(repository, before, before)
    ours = [one for one in entries if is_after(one) and not (is_before(one) and not is_after(one))]
    theirs = [one for one in entries if is_before(one) and one not in ours]
    for side, some in ((before, theirs), (after, ours)):
        if not some:
            raise UsageError(
                f"no run of {side} is in the history", hint="`stoker history` lists runs with their commits"
            )
    found = [
        _row(one, {e.id for e in theirs}, {e.id for e in ours})
        for one in all_series(entries, pattern=pattern)
    ]
    return _corrected([row for row in found if row])


def _side(repository: Path, revisions: str, name: str) -> Callable[[Entry], bool]:
    """Runs whose commit git counts to these revisions; without such a repository, by branch or commit."""
    listed = set(git(repository, "rev-list", "--max-count=100000", revisions, "--").split())
    short = {one[:7] for one in listed}

    def belongs(entry: Entry) -> bool:
        commit = entry.origin.commit
        if listed:
            return commit in listed or (len(commit) < 40 and commit[:7] in short)
        return name == entry.origin.branch or (len(name) >= 7 and commit.startswith(name))

    return belongs


def _row(series: Series, before: set[str], after: set[str]) -> Row | None:
    sides = [
        tuple(f.value for e, f in zip(series.entries, series.points, strict=True) if e.id in ids)[-RUNS:]
        for ids in (before, after)
    ]
    if not all(sides):
        return None
    few = min(map(len, sides)) < FEWEST
    chance = math.nan if few else mann_whitney(np.array(sides[0]), np.array(sides[1]))
    return Row(series=series, before=sides[0], after=sides[1], chance=chance)


def _corrected(rows: Sequence[Row]) -> list[Row]:
    """Holm's correction: of many figures one differs by chance."""
    tested = sorted((row for row in rows if not math.isnan(row.chance)), key=lambda row: row.chance)
    found, worst = [row for row in rows if math.isnan(row.chance)], 0.0
    for number, row in enumerate(tested):
        worst = max(worst, min(1.0, row.chance * (len(tested) - number)))
        found.append(Row(series=row.series, before=row.before, after=row.after, chance=worst))
    return sorted(found, key=lambda row: (row.series.case, row.series.name, row.series.machine))
