"""Every run of a benchmark is kept: a file of `benchmarks/results/` holds a list of runs, the newest last.

    keep(path, report)          append this process's run; a later call of the same process renews it
    runs(name), newest(name)    the reports that were kept
    Spread.of(name, pick)       median, least and most of a figure over the last runs that have it

A run is {"at", "commit", "machine", "report"}, one a line. Runs up to 2026-11-16 came out of git's
history: their commit is the one they were committed with; of later ones it is the code that ran.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
LAST = 5  # as many runs as a published figure looks back on: older ones measured older code


def keep(path: Path, report: dict) -> None:
    """Append a run. What is measured in parts is kept after each part: the last call holds all of them."""
    others = [run for run in _read(path) if run["at"] != _started()]
    run = {"at": _started(), "commit": _commit(), "machine": machine_of(report), "report": report}
    lines = ",\n".join(json.dumps(each) for each in [*others, run])
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(f'{{"runs": [\n{lines}\n]}}\n')
    scratch.replace(path)
    if os.environ.get("STOKER_HISTORY"):  # a nightly's: its figures are checked beside those of other nights
        from stoker.history.results import read_results
        from stoker.history.store import store_for, write_entries

        if store := store_for():
            write_entries(store, [one for one in read_results(path) if one.run and one.at >= _at(run)])


def runs(name: str) -> list[dict]:
    return [run["report"] for run in _read(RESULTS / f"{name}.json")]


def newest(name: str) -> dict:
    return runs(name)[-1]


def machine_of(report: dict) -> str:
    """The kind of machine in words: its card where there is one, and its cores."""
    said = {**report.get("versions", {}), **report, **report.get("machine", {})}
    cores = said.get("cores", os.cpu_count())
    return f"{said['gpu']}, {cores} cores" if said.get("gpu") else f"{cores} cores, {platform.system()}"


@dataclass(frozen=True, kw_only=True)
class Spread:
    """A figure over runs."""

    median: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, name: str, pick: Callable[[dict], float]) -> Spread:
        """Of the last runs that measured it: those of an older shape lack it."""
        found = [value for report in runs(name) if (value := _picked(pick, report)) is not None][-LAST:]
        if not found:
            return cls(median=math.nan, low=math.nan, high=math.nan, count=0)
        return cls(median=statistics.median(found), low=min(found), high=max(found), count=len(found))

    def said(self, form: str = ".2f", *, unit: str = "") -> str:
        """`0.79 (0.58–0.79)`; a single run, or runs that agree, have no range."""
        low, high = (format(value, form) for value in (self.low, self.high))
        middle = format(self.median, form)
        return f"{middle}{unit}" if low == high else f"{middle}{unit} ({low}–{high})"


def _picked(pick: Callable[[dict], float], report: dict) -> float | None:
    try:
        return float(pick(report))
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return None


def _read(path: Path) -> list[dict]:
    return list(json.loads(path.read_text())["runs"]) if path.exists() else []


def _at(run: dict) -> float:
    return datetime.fromisoformat(run["at"]).timestamp()


@cache
def _started() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


@cache
def _commit() -> str:
    """The code that is measured; empty where git does not say."""
    asked = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
