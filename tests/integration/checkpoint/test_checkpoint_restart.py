"""A job under torchrun, killed with -9 and started again: the losses of one that was never killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "load"))

from small_datasets import make_tokens
from warm_launch import Warm, warm

from stoker.checkpoint.saved.tiers import Tiers
from stoker.storage import open_store

pytestmark = pytest.mark.integration

JOB = Path(__file__).with_name("train_job.py")
STEPS = 14


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rng = np.random.default_rng(5)
    return make_tokens(tmp_path / "corpus", [rng.integers(20, 900, n).tolist() for n in (60, 9, 40)])


_SAID = re.compile(r"^step (\d+), loss (.*)$", re.MULTILINE)


@pytest.fixture
def warm_ranks(stoker_environ: Any) -> Iterator[Warm]:
    """For the runs that nobody kills."""
    packages = ("stoker.checkpoint.checkpointer", "stoker.load.loader")
    with warm(*packages, environ=stoker_environ(OMP_NUM_THREADS="1")) as process:
        yield process


def losses(warm_ranks: Warm, corpus: Path, folder: Path, *, log: Path) -> dict[int, str]:
    """The loss of every step that a job of two ranks did."""
    warm_ranks.run(2, JOB, corpus, folder, STEPS, log=log)
    return {int(step): loss for step, loss in _SAID.findall(log.read_text())}


def losses_until_killed(
    corpus: Path, folder: Path, environ: dict[str, str], *, kill_at: int
) -> dict[int, str]:
    """The same of one under torchrun that stands still after a step, and is killed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    found: dict[int, str] = {}
    with subprocess.Popen(
        [*command, *map(str, (JOB, corpus, folder, STEPS, kill_at))],
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as job:
        for line in job.stdout or ():
            ((step, loss),) = _SAID.findall(line)
            found[int(step)] = loss
            if int(step) == kill_at:
                kill_session(job.pid)
    return found


def kill_session(leader: int) -> None:
    """Every process of the job: torchrun gives its ranks sessions of their own."""
    pids = [leader]
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/children"):
            pids += map(int, path.read_text().split())
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_a_script_that_just_ends_has_saved_and_drained_its_last_state(
    tmp_path: Path, stoker_environ: Any
) -> None:
    """It closes nothing. Threads in native code abort a process that exits under them."""
    command = [sys.executable, Path(__file__).parent / "ends_job.py", tmp_path / "run", tmp_path / "far"]
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(command, env=stoker_environ(**world, RANK=rank, LOCAL_RANK=rank)) for rank in "01"
    ]
    assert [rank.wait(timeout=180) for rank in ranks] == [0, 0]
    for tiers in (Tiers(root=tmp_path / "run"), Tiers(root=tmp_path, remote=open_store(tmp_path / "far"))):
        assert tiers.latest(skipped=[]).step == 3


def test_a_killed_job_goes_on_with_the_same_losses(
    warm_ranks: Warm, corpus: Path, tmp_path: Path, stoker_environ: Any
) -> None:
    whole = losses(warm_ranks, corpus, tmp_path / "whole", log=tmp_path / "whole.log")
    environ = stoker_environ(OMP_NUM_THREADS="1")
    first = losses_until_killed(corpus, tmp_path / "killed", environ, kill_at=8)
    rest = losses(warm_ranks, corpus, tmp_path / "killed", log=tmp_path / "rest.log")
    assert list(whole) == list(range(1, STEPS + 1))
    assert max(first) == 8
    assert min(rest) in (4, 7)  # after the newest checkpoint that was durable
    assert {**first, **rest} == whole
    assert all(first[step] == rest[step] for step in first.keys() & rest.keys())
