"""`stoker tune` on real programs: the quick ones always, all eight under -m slow."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

JOBS = Path(__file__).parent / "jobs"
RunStoker = Callable[..., Any]  # the fixture of tests/conftest.py


def tuned(run_stoker: RunStoker, folder: Path, job: str, *options: str) -> dict[str, Any]:
    shutil.copy(JOBS / job, folder)
    words = ["tune", "--json", *options, "--out", str(folder / "trials"), "--"]
    done = run_stoker(*words, sys.executable, str(folder / job), cwd=folder, timeout=400)
    assert done.rc == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_loop_that_makes_its_own_batches_is_told_that_there_is_nothing_to_set(
    run_stoker: RunStoker, tmp_path: Path
) -> None:
    found = tuned(run_stoker, tmp_path, "own_loop.py", "--minutes", "0.5")
    assert not found["better"]
    assert found["trials"] == []
    assert "no DataLoader" in " ".join(found["not_tried"])


def test_a_program_that_would_overwrite_a_checkpoint_is_not_tried(
    run_stoker: RunStoker, tmp_path: Path
) -> None:
    (tmp_path / "best.pt").write_text("weeks of work")
    (tmp_path / "train.py").write_text(
        "import torch\ntorch.nn.Linear(1, 1)(torch.ones(1)).backward()\ntorch.save({}, 'best.pt')\n"
    )
    done = run_stoker("tune", "--out", "t", "--", sys.executable, "train.py", cwd=tmp_path, timeout=60)
    assert done.rc == 2
    assert "would overwrite" in done.stderr
    assert (tmp_path / "best.pt").read_text() == "weeks of work"


def test_a_program_that_cannot_start_is_told_in_a_sentence(run_stoker: RunStoker, tmp_path: Path) -> None:
    done = run_stoker(
        "tune",
        "--out",
        "t",
        "--",
        sys.executable,
        "-c",
        "raise SystemExit('no data')",
        cwd=tmp_path,
        timeout=60,
    )
    assert done.rc == 1
    assert "no training step was seen" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("job", ["plain.py", "trainer.py", "lightning_job.py", "imagenet.py"])
def test_a_starving_job_is_faster_with_the_diff(run_stoker: RunStoker, tmp_path: Path, job: str) -> None:
    found = tuned(run_stoker, tmp_path, job, "--write")
    assert found["better"], found
    assert found["losses"] in ("same", "unseeded"), found["losses"]
    assert (
        "num_workers=" in (tmp_path / job).read_text()
        or "persistent_workers=" in (tmp_path / job).read_text()
    )
    assert (tmp_path / job).read_text() != (JOBS / job).read_text()
    assert found["seconds"] <= 190


@pytest.mark.slow
@pytest.mark.parametrize("job", ["launch.py", "healthy.py"])
def test_a_job_that_does_not_wait_gets_nothing(run_stoker: RunStoker, tmp_path: Path, job: str) -> None:
    assert not tuned(run_stoker, tmp_path, job)["better"]


@pytest.mark.slow
def test_workers_that_find_no_room_are_a_finding(run_stoker: RunStoker, tmp_path: Path) -> None:
    found = tuned(run_stoker, tmp_path, "fails.py")
    failed = [one for one in found["tried"] if "MemoryError" in one["note"]]
    assert all(one["setting"]["num_workers"] > 2 for one in failed)
    assert failed
    assert found["knobs"]["num_workers"] <= 2
