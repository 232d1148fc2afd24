"""A ledger beside a profiler's trace: what the card works in a step always, shares only of steps as long."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

from gpu_prices import Done, judge_ledger


def traced(path: Path, *, steps: int, step_s: float, kernel_s: float) -> Done:
    """One kernel a step, launched all the while."""
    events: list[dict[str, Any]] = []
    for number in range(steps + 1):
        at = 1e6 * number * step_s
        step = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{number}", "ts": at}
        events += [
            {**step, "dur": 1e6 * step_s},
            {"ph": "X", "cat": "kernel", "name": "k", "ts": at, "dur": 1e6 * kernel_s},
            {"ph": "X", "cat": "cpu_op", "name": "aten::mul", "ts": at, "dur": 1e6 * step_s},
        ]
    path.write_text(json.dumps({"traceEvents": events}))
    return Done(ends=[], step_s=step_s, trace=path)


def watched(*, step_s: float, busy: float) -> Done:
    idle = dict.fromkeys(("collective", "copy", "sync", "data", "unattributed"), 0.0)
    told = {"busy": busy, "compute": 1 - busy, **idle}
    return Done(ends=[], step_s=step_s, report={"paced": {"ledger": told}})


def test_steps_that_the_profiler_made_longer_are_compared_by_what_the_card_works_in_one(
    tmp_path: Path,
) -> None:
    trace = traced(tmp_path / "t.json", steps=10, step_s=0.15, kernel_s=0.065)
    row = judge_ledger(watched(step_s=0.075, busy=0.87), trace)
    assert row["judged"]
    assert not row["points_judged"]
    assert row["card_ms_a_step"] == pytest.approx({"watched": 65.25, "traced": 65.0}, rel=1e-3)
    assert row["right"]
    wrong = judge_ledger(watched(step_s=0.075, busy=0.6), trace)
    assert wrong["judged"]
    assert not wrong["right"]


def test_steps_as_long_are_compared_line_by_line(tmp_path: Path) -> None:
    trace = traced(tmp_path / "t.json", steps=10, step_s=0.075, kernel_s=0.065)
    assert judge_ledger(watched(step_s=0.075, busy=0.86), trace)["right"]
    row = judge_ledger(watched(step_s=0.075, busy=0.82), trace)
    assert row["points_judged"]
    assert not row["right"]


@pytest.mark.parametrize("steps", [0, 2])
def test_a_trace_of_two_steps_judges_nothing(tmp_path: Path, steps: int) -> None:
    trace = traced(tmp_path / "t.json", steps=steps, step_s=0.15, kernel_s=0.065)
    assert not judge_ledger(watched(step_s=0.075, busy=0.87), trace)["judged"]
