"""Question: does `stoker history check` find a slowdown of 5% in 2% noise within six runs, and how often does
it raise an alarm where nothing changed; and what does Apache Otava say of the same series?

Method: series are drawn with fixed seeds. Quiet ones of eight families (tests/history/quiet_series.py), each
judged as a check would at its end, and after each of its last 30 runs; planted ones: 60 quiet runs (also 30
and 20), then six slower by 5%, judged after each. Otava's `compute_change_points` with its defaults (window
50, p < 0.001) judges the same numbers; a false alarm of it is a change among the last ten runs for the worse,
a find a change within three runs of the planted one: as for ours.

Command:  python benchmarks/history_check.py [--series 1000]    (Otava: pip install apache-otava, in its own
          environment if you like: --otava PYTHON names it)
Nothing is timed: the result is the same on a busy machine. With 1,000 series some 15 minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "history"))

from quiet_series import FAMILIES, NOISE, SCALE, made  # noqa: E402

from kept_runs import keep  # noqa: E402
from stoker.history.changes import RECENT, SURE, find_changes  # noqa: E402

RUNS, LATER, SLOWER = 60, 30, 0.05
Found = list[tuple[int, float, float]]  # index, level before, level after

OTAVA = """
import json, sys
import numpy as np
from otava.analysis import compute_change_points
for line in sys.stdin:
    try:
        points, _ = compute_change_points(json.loads(line))
        said = [(int(p.index), float(p.stats.mean_1), float(p.stats.mean_2)) for p in points]
    except Exception:
        said = None
    print(json.dumps(said), flush=True)
"""


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--series", type=int, default=1000)
    options.add_argument("--otava", default=sys.executable, help="a Python that has apache-otava")
    options.add_argument("--out", type=Path, default=HERE / "results" / "history_check.json")
    given = options.parse_args()
    judges: dict[str, Callable[[Sequence[float]], Found]] = {"stoker": ours}
    peer = Otava(given.otava)
    if peer.works:
        judges["otava"] = peer
    report = {
        "question": "false alarms and finds of `stoker history check`, beside Apache Otava's",
        "series": given.series,
        "runs": RUNS,
        "sure": SURE,
        "false_alarms_percent": {n: quiet_rates(judge, given.series) for n, judge in judges.items()},
        "found_percent": {n: found_rates(judge, given.series) for n, judge in judges.items()},
    }
    report["otava_raised"] = peer.failed
    keep(given.out, report)
    print(json.dumps(report, indent=1))


def ours(values: Sequence[float]) -> Found:
    return [(one.index, one.before, one.after) for one in find_changes(values)]


class Otava:
    """Otava in a process of its own: it brings packages that stoker does without."""

    def __init__(self, python: str) -> None:
        self.failed = 0  # series that it raised an error for: counted as no alarm and no find
        self._process = subprocess.Popen(
            [python, "-c", OTAVA],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            self.works = self([1.0, 1.0, 1.0, 1.0]) is not None
        except (OSError, ValueError):
            self.works = False
            print("no apache-otava there: judged by stoker alone", file=sys.stderr)

    def __call__(self, values: Sequence[float]) -> Found:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(list(map(float, values))) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline())
        self.failed += told is None
        return [tuple(one) for one in told or ()]


def alarm(found: Found, count: int) -> bool:
    """As a check: the last change, if it is recent and for the worse (higher is better)."""
    return bool(found) and found[-1][2] < found[-1][1] and found[-1][0] >= count - RECENT


def quiet_rates(judge: Callable[[Sequence[float]], Found], series: int) -> dict[str, dict[str, float]]:
    """Percent of quiet series with an alarm: at the end, and ever in the last 30 nightly checks."""
    rates = {}
    for family in FAMILIES:
        drawn = [made(family, RUNS, seed) for seed in range(series)]
        last = [alarm(judge(one), RUNS) for one in drawn]
        ever = [
            any(alarm(judge(one[:n]), n) for n in range(RUNS - LATER + 1, RUNS + 1))
            for one in drawn[: series // 10]
        ]
        rates[family] = {
            "in one check": 100 * float(np.mean(last)),
            "in 30 nightly checks": 100 * float(np.mean(ever)) if ever else float("nan"),
        }
    return rates


def found_rates(judge: Callable[[Sequence[float]], Found], series: int) -> dict[str, float]:
    """Percent of planted slowdowns found within six runs, by how many quiet runs came before."""
    return {
        f"after {count} runs": 100 * float(np.mean([_is_found(judge, count, seed) for seed in range(series)]))
        for count in (60, 30, 20)
    }


def _is_found(judge: Callable[[Sequence[float]], Found], count: int, seed: int) -> bool:
    values = SCALE * (1 + NOISE * np.random.default_rng([1, count, seed]).standard_normal(count + 6))
    values[count:] *= 1 - SLOWER
    return any(
        abs(at - count) <= 3 and after < before
        for last in range(1, 7)
        for at, before, after in judge(values[: count + last])
    )


if __name__ == "__main__":
    main()
