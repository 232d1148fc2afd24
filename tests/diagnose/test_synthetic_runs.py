"""Simulated runs on many machines: faults found first and alone, healthy runs left alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from synthetic import FAULTS, Run, healthy, record

from stoker.diagnose.rules import diagnose
from stoker.watch.runs.flat import read_flat

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def verdict(make: Callable[[np.random.Generator], Run], seed: int, path: Path) -> tuple[Run, list[str], str]:
    rng = np.random.default_rng([seed, *make.__name__.encode()])
    run = make(rng)
    findings = diagnose(read_flat(record(run, rng, path))).findings
    return run, [one.kind for one in findings], findings[0].cause if findings else ""


@pytest.mark.parametrize("seed", range(16))
def test_a_healthy_run_is_called_healthy(seed: int, tmp_path: Path) -> None:
    _, kinds, _ = verdict(healthy, seed, tmp_path / "run.jsonl")
    assert kinds == ["healthy"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_first_with_its_cause_and_no_other(
    fault: Callable[[np.random.Generator], Run], seed: int, tmp_path: Path
) -> None:
    run, kinds, cause = verdict(fault, seed, tmp_path / "run.jsonl")
    assert kinds[0] == run.label
    assert set(kinds) <= {run.label, *run.also}
    assert run.cause in (None, cause)
