"""Hugging Face's Trainer and Lightning with stoker's callbacks: told to go, or killed, they come back with
the same losses and the same weights, to the bit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "load"))

from clusters import wait_until
from rank_notes import losses, rank_pid
from small_datasets import make_tokens
from warm_launch import Warm, warm

from stoker.checkpoint.saved.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("trainer_job.py")
STEPS, HOLD_AT = 14, 7  # in the second epoch of either
IMPORTS = {  # the package, and what of it a rank needs
    "hugging_face": ("transformers", "transformers.trainer", "stoker.integrations.transformers"),
    "lightning": ("lightning", "lightning.pytorch", "stoker.integrations.lightning"),
}


def train_under_torchrun(name: str, corpus: Path, folder: Path, environ: dict[str, str]) -> None:
    """Two ranks, to the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (folder / "log").open("a") as log:
        done = subprocess.run(
            [*command, JOB, name, corpus, folder, str(STEPS), "0"],
            env=environ,
            stdout=log,
            stderr=log,
            timeout=200,
        )
    assert done.returncode == 0, (folder / "log").read_text()[-3000:]


def end(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def warm_ranks(framework: str, stoker_environ: Any) -> Iterator[Warm]:
    """The ranks of a framework are started four times here, and importing it takes longer than the rest."""
    with warm(*IMPORTS[framework], environ=stoker_environ(OMP_NUM_THREADS="1")) as process:
        yield process


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    documents = [rng.integers(20, 900, 90).tolist() for _ in range(3)]
    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens", documents)


@pytest.fixture(scope="module", params=list(IMPORTS))
def framework(request: pytest.FixtureRequest, skip_or_fail: Any) -> str:
    package = IMPORTS[request.param][0]
    if importlib.util.find_spec(package) is None:
        skip_or_fail(f"{package} is not installed: `make venv` brings it")
    return str(request.param)


@pytest.fixture(scope="module")
def trained(
    framework: str, corpus: Path, tmp_path_factory: pytest.TempPathFactory, stoker_environ: Any
) -> tuple[str, Path]:
    """A framework, and what a run of it leaves that nobody disturbs."""
    folder = tmp_path_factory.mktemp(framework)
    train_under_torchrun(framework, corpus, folder, stoker_environ(OMP_NUM_THREADS="1"))
    assert [len(losses(folder, rank)) for rank in (0, 1)] == [STEPS, STEPS]
    return framework, folder


def test_a_trainer_that_is_told_to_go_comes_back_bit_for_bit(
    trained: tuple[str, Path], warm_ranks: Warm, corpus: Path, tmp_path: Path
) -> None:
    name, whole = trained
    with warm_ranks.ranks(2, JOB, name, corpus, tmp_path, STEPS, HOLD_AT, log=tmp_path / "log"):
        wait_until(lambda: len(losses(tmp_path, 1)) == HOLD_AT, "some steps are done", seconds=120)
        os.kill(rank_pid(tmp_path, 1), signal.SIGTERM)
    found = Tiers(root=tmp_path / "checkpoints").latest(skipped=[])
    assert found.manifest.marks.reason == "SIGTERM on rank 1", (tmp_path / "log").read_text()[-3000:]
    assert [len(losses(tmp_path, rank)) for rank in (0, 1)] == [found.step, found.step]
    assert HOLD_AT <= found.step < STEPS

    warm_ranks.run(2, JOB, name, corpus, tmp_path, STEPS, 0, log=tmp_path / "log")
    assert [losses(tmp_path, rank) for rank in (0, 1)] == [losses(whole, rank) for rank in (0, 1)]
    assert end(tmp_path) == end(whole)


def test_a_trainer_that_is_killed_comes_back_bit_for_bit(
    trained: tuple[str, Path], warm_ranks: Warm, corpus: Path, tmp_path: Path
) -> None:
    name, whole = trained
    saved = Tiers(root=tmp_path / "checkpoints")
    with warm_ranks.ranks(2, JOB, name, corpus, tmp_path, STEPS, HOLD_AT, log=tmp_path / "log"):
        wait_until(lambda: len(losses(tmp_path, 1)) == HOLD_AT, "some steps are done", seconds=120)
        wait_until(lambda: saved.latest(skipped=[]), "a checkpoint is durable", seconds=60)
        for pid in (rank_pid(tmp_path, 0), rank_pid(tmp_path, 1)):
            os.kill(pid, signal.SIGKILL)
    step = saved.latest(skipped=[]).step
    assert step in (3, 6)
    before = [losses(tmp_path, rank) for rank in (0, 1)]

    warm_ranks.run(2, JOB, name, corpus, tmp_path, STEPS, 0, log=tmp_path / "log")
    for rank in (0, 1):
        rest = losses(tmp_path, rank)[len(before[rank]) :]
        assert before[rank][:step] + rest == losses(whole, rank)
    assert end(tmp_path) == end(whole)
