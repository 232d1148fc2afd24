"""Benchmarks append their runs, and what is published is the middle of them with its range."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import kept_runs  # noqa: E402 - the path to it is set just above

RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))


def run_once(path: Path, *rates: float) -> None:
    """A benchmark in a process of its own, which keeps what it knows after each part."""
    code = "import sys; from pathlib import Path; from kept_runs import keep\n"
    code += "for rate in sys.argv[2:]: keep(Path(sys.argv[1]), {'rate': float(rate), 'cores': 2})"
    command = [sys.executable, "-c", code, path, *map(str, rates)]
    subprocess.run(list(map(str, command)), check=True, cwd=BENCHMARKS)


def test_a_run_is_added_to_those_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"runs": [{"at": "2026-11-15", "report": {"rate": 3.0}}]}')
    run_once(path, 1.0, 5.0)  # in two parts: one run
    monkeypatch.setattr(kept_runs, "RESULTS", tmp_path)
    assert [report["rate"] for report in kept_runs.runs("mine")] == [3.0, 5.0]
    kept = json.loads(path.read_text())["runs"][-1]
    assert kept["machine"] == "2 cores, Linux"
    assert kept["at"] > "2026-11"


def test_a_figure_is_the_median_of_the_last_runs_that_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports = [{"rate": 100.0}, {"other": 1}, *({"rate": rate} for rate in (9.0, 2.0, 4.0, 8.0, 3.0))]
    (tmp_path / "mine.json").write_text(json.dumps({"runs": [{"report": report} for report in reports]}))
    monkeypatch.setattr(kept_runs, "RESULTS", tmp_path)
    found = kept_runs.Spread.of("mine", lambda run: run["rate"])
    assert (found.count, found.said(".0f", unit=" ms")) == (5, "4 ms (2–9)")


def test_runs_that_agree_have_no_range() -> None:
    assert kept_runs.Spread(median=0.961, low=0.96, high=0.962, count=3).said() == "0.96"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_run_says_when_where_and_on_which_code(path: Path) -> None:
    kept = json.loads(path.read_text())["runs"]
    assert kept == sorted(kept, key=lambda run: run["at"])
    for run in kept:
        assert run["at"]
        assert run["commit"]
        assert "cores" in run["machine"]
        assert run["report"]


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_no_benchmark_writes_over_what_was_kept(script: Path) -> None:
    text = script.read_text("utf-8")
    writes = [line for line in text.splitlines() if "write_text" in line and "json" in line]
    assert [line for line in writes if "results" in line.lower() or "out" in line.split(".write")[0]] == []
