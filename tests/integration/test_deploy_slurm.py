"""`stoker deploy slurm` on a real cluster of two nodes: a training that is sent away and comes back."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from clusters import wait_until
from rank_notes import losses
from s3_server import free_ports
from slurm_cluster import SlurmCluster, slurm_cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

TRAINING = Path(__file__).with_name("preempted_training.py")
STEPS, HOLD_AT = 12, 5
JOB = {
    "name": "tiny", "nodes": 2, "gpus_per_node": 1, "rank_memory": "200MB", "dataset": "10MB",
    "checkpoint": "10MB", "read_rate": "1MB/s", "nvme": "1GB", "shm": "64MB",
}  # fmt: skip


@pytest.fixture(scope="module")
def commands(require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`stoker` and `torchrun` as an environment that has them installed would."""
    for name in ("munged", "slurmctld", "slurmd"):
        require_binary(name)
    folder = tmp_path_factory.mktemp("bin")
    for name, module in (("stoker", "stoker.cli"), ("torchrun", "torch.distributed.run")):
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
        path.chmod(0o755)
    return folder


@contextmanager
def ready_cluster(
    folder: Path, commands: Path, environ: Callable[..., dict[str, str]], **settings: str
) -> Iterator[SlurmCluster]:
    with slurm_cluster(folder, max_array_size=2, cpus=8, **settings) as cluster:
        environment = environ(**cluster.environment)
        environment |= {"PATH": f"{commands}:{cluster.environment['PATH']}", "OMP_NUM_THREADS": "1"}
        yield replace(cluster, environment=environment)
        cluster.ask("scancel", "--quiet", "--user", cluster.user)
        wait_until(cluster.is_idle, "the queue is empty")


@pytest.fixture(scope="module")
def cluster(
    commands: Path,
    stoker_environ: Callable[..., dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[SlurmCluster]:
    with ready_cluster(tmp_path_factory.mktemp("slurm"), commands, stoker_environ) as cluster:
        yield cluster


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
    wait_until(lambda: list((folder / "checkpoints").glob("0*")), "the ranks have saved")
    wait_until(lambda: len(losses(folder, 1)) == STEPS, "the job has come back", seconds=90)
    wait_until(cluster.is_idle, "the job has ended")

    assert "Restarts=1 " in cluster.ask("scontrol", "show", "job", job)
    for rank in (0, 1):
        assert len(losses(reference, rank)) == STEPS
        assert losses(folder, rank) == losses(reference, rank)
    log = (folder / "slurm" / f"tiny-{job}.log").read_text()
    assert f"step {HOLD_AT} is saved as" in log or f"step {HOLD_AT + 1} is saved as" in log
    assert "ranks have left with 0; the job goes back to the queue" in log
    assert json.loads(cluster.ask("stoker", "stage", "ls", "--cache", str(folder / "nvme"), "--json"))


def give_way(cluster: SlurmCluster) -> None:
    """An urgent job wants both nodes."""
    urgent = ("--partition", "urgent", "--nodes", "2", "--exclusive", "--output", "/dev/null")
    cluster.ask("sbatch", *urgent, "--wrap", "sleep 1")


def come_back(cluster: SlurmCluster, folder: Path, reference: Path, job: str) -> str:
    """Wait for the end of a job that was sent away once; every step's loss is that of an undisturbed one."""
    wait_until(lambda: len(final(folder, 1)) == STEPS, "the job has come back", seconds=180)
    wait_until(cluster.is_idle, "the job has ended", seconds=60)
    for rank in (0, 1):
        assert final(folder, rank) == final(reference, rank)
    return cluster.ask("scontrol", "show", "job", job)


def final(folder: Path, rank: int) -> dict[str, str]:
    """The last loss of each step: what came after the last checkpoint was done again."""
    return dict(line.split(" ", 1) for line in losses(folder, rank))


def test_a_training_that_gives_way_to_an_urgent_job_comes_back_and_loses_nothing(
    cluster: SlurmCluster, large_dataset: Path, tmp_path: Path
) -> None:
    """Slurm tells the steps (SIGTERM, as GraceTime begins) and not the batch script."""
    folder, reference = tmp_path / "preempted", tmp_path / "undisturbed"
    with undisturbed(cluster, reference, large_dataset):
        job = submit(cluster, folder, large_dataset, "--hold-at", str(HOLD_AT))
        wait_until(lambda: len(losses(folder, 1)) >= HOLD_AT, "the ranks train", seconds=90)
        give_way(cluster)
    assert "Restarts=1 " in come_back(cluster, folder, reference, job)
    for rank in (0, 1):
        assert losses(folder, rank) == losses(reference, rank)  # no step was done twice


@pytest.mark.slow
def test_a_batch_script_that_slurm_tells_of_a_preemption_brings_the_job_back(
    commands: Path,
    stoker_environ: Callable[..., dict[str, str]],
    large_dataset: Path,
    tmp_path: Path,
) -> None:
    """With the setting that the guide gives, in the spelling of this version."""
    folder, reference, told = tmp_path / "told", tmp_path / "undisturbed", tmp_path / "slurm"
    setting = {"settings": "SlurmctldParameters=preempt_send_user_signal"}
    with ready_cluster(told, commands, stoker_environ, **setting) as telling:
        with undisturbed(telling, reference, large_dataset):
            job = submit(telling, folder, large_dataset, "--hold-at", str(HOLD_AT))
            wait_until(lambda: len(losses(folder, 1)) >= HOLD_AT, "the ranks train", seconds=90)
            give_way(telling)
        assert "Restarts=1 " in come_back(telling, folder, reference, job)
    assert "warned: ranks save and leave" in (folder / "slurm" / f"tiny-{job}.log").read_text()


def force(cluster: SlurmCluster, corpus: Path, tmp_path: Path, how: Callable[[str], object]) -> None:
    """Sent away once, so that there is a checkpoint; then by force, a few steps later."""
    folder, reference = tmp_path / "forced", tmp_path / "undisturbed"
    with undisturbed(cluster, reference, corpus):
        job = submit(cluster, folder, corpus, "--hold-at", str(HOLD_AT), str(HOLD_AT + 4))
        wait_until(lambda: len(losses(folder, 1)) >= HOLD_AT, "some steps are done", seconds=90)
        cluster.ask("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: len(final(folder, 1)) >= HOLD_AT + 4, "it has come back", seconds=180)
    how(job)
    assert "Restarts=2 " in come_back(cluster, folder, reference, job)


@pytest.mark.slow
def test_a_training_whose_node_dies_comes_back_from_its_last_checkpoint(
    commands: Path,
    stoker_environ: Callable[..., dict[str, str]],
    large_dataset: Path,
    tmp_path: Path,
) -> None:
    with ready_cluster(tmp_path / "slurm", commands, stoker_environ) as mortal:

        def die(job: str) -> None:
            mortal.lose("n1", processes=[int((tmp_path / "forced/pid-1").read_text())])
            mortal.bring_back("n1")

        force(mortal, large_dataset, tmp_path, die)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("scontrol", "requeue"), ("scancel", "--full", "--signal=USR1")])
def test_a_training_that_is_put_back_by_hand_goes_on_from_its_last_checkpoint(
    cluster: SlurmCluster, large_dataset: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    force(cluster, large_dataset, tmp_path, lambda job: cluster.ask(*command, job))
