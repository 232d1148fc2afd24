"""The job of tests/scenarios with the two lines that traceml-ai asks of a plain training loop.

Without them its verdict is "insufficient step-time data", whatever is wrong.
"""

from __future__ import annotations

import sys
from pathlib import Path

import traceml_ai

traceml_ai.init(mode="auto")  # before the job takes DataLoader into its own names
sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "scenarios"))

import job  # noqa: E402

one_step = job.one_step


def traced_step(given, model, *rest) -> None:
    with traceml_ai.trace_step(model):
        one_step(given, model, *rest)


if __name__ == "__main__":
    job.one_step = traced_step
    job.main()
