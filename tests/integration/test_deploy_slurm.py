"""`stoker deploy slurm` on a real cluster of two nodes: a training that is sent away and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clusters import wait_until
from s3_server import free_ports
from slurm_cluster import SlurmCluster, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

TRAINING = Path(__file__).with_name("preempted_training.py")
STEPS, HOLD_AT = 12, 5
JOB = {
    "name": "tiny", "nodes": 2, "gpus_per_node": 1, "rank_memory": "200MB", "dataset": "10MB",
    "checkpoint": "10MB", "read_rate": "1MB/s", "nvme": "1GB",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(
    require_binary: Callable[[str], str],
    stoker_environ: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmCluster]:
    for name in ("munged", "slurmctld", "slurmd"):
        require_binary(name)
    commands = _commands(tmp_path_factory.mktemp("bin"))
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), max_array_size=2, cpus=8) as cluster:
        environment = stoker_environ(**cluster.environment)
        environment |= {"PATH": f"{commands}:{cluster.environment['PATH']}", "OMP_NUM_THREADS": "1"}
        yield SlurmCluster(environment=environment, user=cluster.user)
        cluster.ask("scancel", "--quiet", "--user", cluster.user)
        wait_until(cluster.is_idle, "the queue is empty")


def _commands(folder: Path) -> Path:
    """`stoker` and `torchrun` as an environment that has them installed would."""
    for name, module in (("stoker", "stoker.cli"), ("torchrun", "torch.distributed.run")):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    return folder


def submit(cluster: SlurmCluster, folder: Path, corpus: Path, *options: str) -> str:
    """Deploy as a user would, and submit what was written."""
    folder.mkdir()
    plan = folder.with_suffix(".json")
    plan.write_text(json.dumps(JOB))
    command = [
        *("stoker", "deploy", "slurm", str(plan), "--out", str(folder / "slurm"), "--data", str(corpus)),
        *("--cache", str(folder / "nvme"), "--shared", str(folder / "shared")),
        *("--time", "10", "--grace", "60", "--gpu", "none", "--no-doctor"),
        *("--", str(TRAINING), str(corpus), "--steps", str(STEPS), "--folder", str(folder)),
        *("--cache", str(folder / "nvme"), *options),
    ]  # fmt: skip
    subprocess.run(command, env=cluster.environment, check=True, capture_output=True, timeout=60)
    done = subprocess.run(
        ["sbatch", "--parsable", "train.sbatch"],
        cwd=folder / "slurm",
        env=cluster.environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.stdout.strip()


def losses(folder: Path, rank: int) -> list[str]:
    path = folder / f"losses-{rank}"
    return path.read_text().splitlines() if path.exists() else []


@contextmanager
def undisturbed(cluster: SlurmCluster, folder: Path, corpus: Path) -> Iterator[None]:
    """The same training on two such nodes, without Slurm, while the block runs."""
    folder.mkdir()
    (port,) = free_ports(1)
    world = {"WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, TRAINING, corpus, "--steps", str(STEPS), "--folder", folder],
                    env=cluster.environment
                    | world
                    | {
                        "RANK": rank,
                        "GROUP_RANK": rank,
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": str(port),
                    },
                )
            )
            for rank in "01"
        ]
        yield
        assert [rank.wait(60) for rank in ranks] == [0, 0]


def test_a_training_that_slurm_sends_away_comes_back_and_loses_nothing(
    cluster: SlurmCluster, large_dataset: Path, tmp_path: Path
) -> None:
    folder, reference = tmp_path / "sent-away", tmp_path / "undisturbed"
    with undisturbed(cluster, reference, large_dataset):
        job = submit(cluster, folder, large_dataset, "--hold-at", str(HOLD_AT))
        wait_until(lambda: len(losses(folder, 0)) == HOLD_AT, "some steps are done", seconds=90)
        cluster.ask("scancel", "--batch", "--signal=USR1", job)
    wait_until((folder / "state.pt").exists, "the ranks have saved")
    wait_until(lambda: len(losses(folder, 1)) == STEPS, "the job has come back", seconds=90)
    wait_until(cluster.is_idle, "the job has ended")

    assert "Restarts=1 " in cluster.ask("scontrol", "show", "job", job)
    for rank in (0, 1):
        assert len(losses(reference, rank)) == STEPS
        assert losses(folder, rank) == losses(reference, rank)
    log = (folder / "slurm" / f"tiny-{job}.log").read_text()
    assert "ranks have left with 0; the job goes back to the queue" in log
    assert json.loads(cluster.ask("stoker", "stage", "ls", "--cache", str(folder / "nvme"), "--json"))
