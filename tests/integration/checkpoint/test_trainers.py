"""Hugging Face's Trainer and Lightning with stoker's callbacks: told to go, or killed, they come back with
the same losses and the same weights, to the bit."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[2] / "load"))

from clusters import wait_until
from small_datasets import make_tokens

from stoker.checkpoint.saved.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("trainer_job.py")
STEPS, HOLD_AT = 14, 7  # in the second epoch of either
PACKAGES = {"hugging_face": "transformers", "lightning": "lightning"}


@contextmanager
def training(
    name: str, corpus: Path, folder: Path, environ: dict[str, str], *, hold_at: int = 0
) -> Iterator[Any]:
    """Two ranks under torchrun."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (
        (folder / "log").open("a") as log,
        subprocess.Popen(
            [*command, JOB, name, corpus, folder, str(STEPS), str(hold_at)],
            env=environ,
            stdout=log,
            stderr=log,
            start_new_session=True,
        ) as job,
    ):
        try:
            yield job
            job.wait(150)
        finally:
            if job.poll() is None:
                job.kill()


def losses(folder: Path, rank: int) -> list[str]:
    path = folder / f"losses-{rank}"
    return path.read_text().splitlines() if path.exists() else []


def rank_pid(folder: Path, rank: int) -> int:
    return int((folder / f"pid-{rank}").read_text())


def end(folder: Path) -> list[str]:
    return [(folder / f"digest-{rank}").read_text() for rank in (0, 1)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(5)
    documents = [rng.integers(20, 900, 90).tolist() for _ in range(3)]
    return make_tokens(tmp_path_factory.mktemp("corpus") / "tokens", documents)


@pytest.fixture(scope="module", params=list(PACKAGES))
def trained(
    request: pytest.FixtureRequest,
    corpus: Path,
    tmp_path_factory: pytest.TempPathFactory,
    stoker_environ: Any,
    skip_or_fail: Any,
) -> tuple[str, Path]:
    """A framework, and what a run of it leaves that nobody disturbs."""
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        skip_or_fail(f"{PACKAGES[request.param]} is not installed: `make venv` brings it")
    folder = tmp_path_factory.mktemp(request.param)
    with training(request.param, corpus, folder, stoker_environ(OMP_NUM_THREADS="1")) as job:
        pass
    assert job.returncode == 0, (folder / "log").read_text()[-3000:]
    assert [len(losses(folder, rank)) for rank in (0, 1)] == [STEPS, STEPS]
    return request.param, folder


def test_a_trainer_that_is_told_to_go_comes_back_bit_for_bit(
    trained: tuple[str, Path], corpus: Path, tmp_path: Path, stoker_environ: Any
) -> None:
    (name, whole), environ = trained, stoker_environ(OMP_NUM_THREADS="1")
    with training(name, corpus, tmp_path, environ, hold_at=HOLD_AT):
        wait_until(lambda: len(losses(tmp_path, 1)) == HOLD_AT, "some steps are done", seconds=120)
        os.kill(rank_pid(tmp_path, 1), signal.SIGTERM)
    found = Tiers(root=tmp_path / "checkpoints").latest(skipped=[])
    assert found.manifest.marks.reason == "SIGTERM on rank 1", (tmp_path / "log").read_text()[-3000:]
    assert [len(losses(tmp_path, rank)) for rank in (0, 1)] == [found.step, found.step]
    assert HOLD_AT <= found.step < STEPS

    with training(name, corpus, tmp_path, environ) as again:
        pass
    assert again.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert [losses(tmp_path, rank) for rank in (0, 1)] == [losses(whole, rank) for rank in (0, 1)]
    assert end(tmp_path) == end(whole)


def test_a_trainer_that_is_killed_comes_back_bit_for_bit(
    trained: tuple[str, Path], corpus: Path, tmp_path: Path, stoker_environ: Any
) -> None:
    (name, whole), environ = trained, stoker_environ(OMP_NUM_THREADS="1")
    saved = Tiers(root=tmp_path / "checkpoints")
    with training(name, corpus, tmp_path, environ, hold_at=HOLD_AT) as job:
        wait_until(lambda: len(losses(tmp_path, 1)) == HOLD_AT, "some steps are done", seconds=120)
        wait_until(lambda: saved.latest(skipped=[]), "a checkpoint is durable", seconds=60)
        for pid in (job.pid, rank_pid(tmp_path, 0), rank_pid(tmp_path, 1)):
            os.kill(pid, signal.SIGKILL)
    step = saved.latest(skipped=[]).step
    assert step in (3, 6)
    before = [losses(tmp_path, rank) for rank in (0, 1)]

    with training(name, corpus, tmp_path, environ) as again:
        pass
    assert again.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    for rank in (0, 1):
        rest = losses(tmp_path, rank)[len(before[rank]) :]
        assert before[rank][:step] + rest == losses(whole, rank)
    assert end(tmp_path) == end(whole)
