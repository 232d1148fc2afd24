"""How right is the diagnosis? Simulated runs by the hundred, and what was said of them.

    python tests/diagnose/matrix.py [RUNS OF EACH KIND]

rewrites the tables of docs/concepts/diagnosis.md: thresholds, and the confusion matrix.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
from synthetic import FAULTS, healthy, record

from stoker.diagnose.rules import diagnose
from stoker.diagnose.thresholds import THRESHOLDS
from stoker.watch.runs.flat import read_flat

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "diagnosis.md"
HEALTHY_FOR_ONE_FAULT = 7  # a third of all runs


def main(runs: int = 40) -> None:
    text = PAGE.read_text("utf-8")
    for name, table in (("thresholds", thresholds()), ("matrix", matrix(runs))):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        text = head + begin + table + end + rest.partition(end)[2]
    PAGE.write_text(text, "utf-8")


def thresholds() -> str:
    rows = [f"| `{name}` | {one.value:g} | {one.why} |" for name, one in THRESHOLDS.items()]
    return "\n".join(["| threshold | value | why |", "|---|---|---|", *rows]) + "\n"


def matrix(runs: int) -> str:
    """Every kind: how many runs had it, what came first, how often something false stood beside it."""
    first: Counter[tuple[str, str]] = Counter()
    false: Counter[str] = Counter()
    causes: Counter[bool] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for make in (*FAULTS, *[healthy] * HEALTHY_FOR_ONE_FAULT):
            for seed in range(runs):
                draw = np.random.default_rng([seed, sum(first.values())])
                run = make(draw)
                found = diagnose(read_flat(record(run, draw, Path(folder) / "run.jsonl"))).findings
                said = found[0].kind if found else "no verdict"
                first[run.label, said] += 1
                false.update(one.kind for one in found if one.kind not in (run.label, *run.also))
                if run.cause and said == run.label:
                    causes[found[0].cause == run.cause] += 1
    return _rows(first, false) + _sums(first, false, causes)


def _rows(first: Counter[tuple[str, str]], false: Counter[str]) -> str:
    rows = ["| kind | runs | found first | said instead | said wrongly of others |", "|---|---|---|---|---|"]
    for kind in sorted({label for label, _ in first}):
        runs = sum(count for (label, _), count in first.items() if label == kind)
        others = [f"{said} {n}" for (label, said), n in sorted(first.items()) if label == kind != said]
        cells = (kind, runs, first[kind, kind], ", ".join(others), false[kind] or "")
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows) + "\n"


def _sums(first: Counter[tuple[str, str]], false: Counter[str], causes: Counter[bool]) -> str:
    faults = {key: n for key, n in first.items() if key[0] != "healthy"}
    right = sum(n for (label, said), n in faults.items() if label == said)
    alarms = sum(n for kind, n in false.items() if kind != "healthy")
    sound = sum(n for (label, _), n in first.items() if label == "healthy")
    return (
        f"\n{sum(first.values())} runs, {sound} of them healthy. Recall {right / sum(faults.values()):.3f}, "
        f"precision {right / (right + alarms):.3f}, cause right {causes[True]} of {sum(causes.values())} "
        f"runs that have one, false alarms on healthy runs: {sound - first['healthy', 'healthy']}.\n"
    )


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
