"""Every parallelism, at every moment of a loop, back on other numbers of ranks: each element as it was."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
KINDS = {"ddp": 2, "fsdp1": 2, "fsdp2": 2, "tp": 2, "stages": 2, "experts": 2, "hsdp": 4, "fsdp2tp": 4}
MOMENTS = ("step", "evaluation", "accumulation", "behind")  # the last with overlap, in a loop that goes on

# Each kind once, with a moment and sizes that are hard for it: same, and then half, double or three ranks.
QUICK = [
    "ddp-step-2-3", "fsdp2-evaluation-2-2-4", "hsdp-evaluation-4-4-2", "tp-accumulation-2-4",
    "fsdp2tp-evaluation-4-3", "fsdp1-accumulation-2-3", "hsdp-behind-4-2",
    "stages-step-2-2-1", "experts-step-2-2-3",
]  # fmt: skip
WHOLE = [
    f"{kind}-{moment}-{size}-{size}-{size // 2}-{2 * size}-3"
    for kind, size in KINDS.items()
    for moment in MOMENTS
]


def run_cases(folder: Path, cases: list[str], stoker_environ: Any) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "matrix_job.py"), str(folder), *cases],
        env=stoker_environ(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL"),
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("MATRIX ")]
    return {one["case"]: one["runs"] for one in found}


def check(case: str, runs: list[dict[str, Any]]) -> None:
    kind, _, before, *sizes = case.split("-")
    assert [run.get("size") for run in runs[1:]] == [int(size) for size in sizes]
    for run in runs:
        assert not any(run["codes"])
    for run in runs[1:]:
        for rank, report in enumerate(run["ranks"]):
            if kind == "stages" and run["size"] != int(before):
                assert "model.embed.weight was not the same on all ranks when it was saved" in report["said"]
                continue
            assert (report["said"], report["wrong"]) == ("", [])
            assert report["count"] > 20
            if run["size"] == int(before):
                assert report["own"] == [rank, True]


@pytest.fixture(scope="module")
def quick(stoker_environ: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_cases(tmp_path_factory.mktemp("matrix"), QUICK, stoker_environ)


@pytest.mark.parametrize("case", QUICK)
def test_what_comes_back_is_what_the_ranks_held(case: str, quick: dict[str, Any]) -> None:
    check(case, quick[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", WHOLE)
def test_every_kind_moment_and_size(case: str, stoker_environ: Any, tmp_path: Path) -> None:
    check(case, run_cases(tmp_path, [case], stoker_environ)[case])
