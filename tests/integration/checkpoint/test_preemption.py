"""Jobs that are told to go save after the same step on all ranks, and come back with the same losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from clusters import wait_until
from rank_notes import losses, rank_pid
from warm_launch import Warm, warm

from stoker.checkpoint.saved.tiers import Tiers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

TRAINING = Path(__file__).parents[1] / "preempted_training.py"
STEPS, HOLD_AT = 12, 5


@pytest.fixture(scope="module")
def corpus(large_dataset: Path) -> Path:
    """With a tokenizer of 2,000 ids: the example's model for a corpus that names none has 65,536, and a step
    of that takes a second."""
    return large_dataset


@contextmanager
def training(
    corpus: Path, folder: Path, environ: dict[str, str], *options: str, within: tuple[str, ...] = ()
) -> Iterator[Any]:
    """Two ranks under torchrun."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    with (
        (folder / "log").open("a") as log,
        subprocess.Popen(
            [*within, *command, TRAINING, corpus, "--steps", str(STEPS), "--folder", folder, *options],
            env=environ,
            stderr=log,
            start_new_session=True,
        ) as job,
    ):
        try:
            yield job
            job.wait(120)
        finally:
            if job.poll() is None:
                job.kill()


@pytest.fixture(scope="module")
def warm_ranks(stoker_environ: Any) -> Iterator[Warm]:
    """For runs that go to their end: nobody tells torchrun anything."""
    with warm("stoker.checkpoint.checkpointer", environ=stoker_environ(OMP_NUM_THREADS="1")) as it:
        yield it


@pytest.fixture(scope="module")
def undisturbed(corpus: Path, warm_ranks: Warm, tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    warm_ranks.run(2, TRAINING, corpus, "--steps", STEPS, "--folder", folder, log=folder / "log")
    return [losses(folder, rank) for rank in (0, 1)]


def tell_the_agent(job: Any, folder: Path) -> None:
    """As Kubernetes does: the first process of the pod, which is torchrun, gets it and passes it on."""
    job.terminate()


def tell_one_rank(job: Any, folder: Path) -> None:
    os.kill(rank_pid(folder, 1), signal.SIGTERM)


def tell_both_differently(job: Any, folder: Path) -> None:
    os.kill(rank_pid(folder, 1), signal.SIGUSR1)
    os.kill(rank_pid(folder, 0), signal.SIGTERM)


@pytest.mark.parametrize(
    "tell", [tell_the_agent, pytest.param(tell_one_rank, marks=pytest.mark.slow), tell_both_differently]
)
def test_a_job_that_is_told_to_go_comes_back_with_the_same_losses(
    tell: Callable[[Any, Path], None],
    corpus: Path,
    undisturbed: list[list[str]],
    warm_ranks: Warm,
    tmp_path: Path,
    stoker_environ: Any,
) -> None:
    environ = stoker_environ(OMP_NUM_THREADS="1")
    holds = ("--hold-at", str(HOLD_AT), "--hold-rank", "1")
    with training(corpus, tmp_path, environ, *holds) as job:
        wait_until(lambda: len(losses(tmp_path, 1)) == HOLD_AT, "some steps are done", seconds=90)
        tell(job, tmp_path)
    found = Tiers(root=tmp_path / "checkpoints").latest(skipped=[])
    assert found.manifest.marks.reason.startswith("SIG")
    assert f"step {found.step} is saved as {found.name}" in (tmp_path / "log").read_text()
    assert [len(losses(tmp_path, rank)) for rank in (0, 1)] == [found.step, found.step]
    assert found.step < STEPS

    warm_ranks.run(2, TRAINING, corpus, "--steps", STEPS, "--folder", tmp_path, log=tmp_path / "log")
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed
    assert Tiers(root=tmp_path / "checkpoints").latest(skipped=[]).manifest.marks.reason == "final"


def test_the_first_process_of_a_pod_passes_its_end_on_and_everything_is_saved(
    corpus: Path, undisturbed: list[list[str]], tmp_path: Path, stoker_environ: Any, skip_or_fail: Any
) -> None:
    """As a container runtime does: torchrun is process 1 of a namespace of its own, gets SIGTERM, and what is
    left when the grace is over goes with SIGKILL. Process 1 has no default handlers."""
    pod = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*pod, "true"], capture_output=True).returncode:
        skip_or_fail("this user may not make a namespace of processes: run as root")
    environ = stoker_environ(OMP_NUM_THREADS="1")
    holds = ("--hold-at", str(HOLD_AT), "--hold-rank", "1")
    with training(corpus, tmp_path, environ, *holds, within=pod) as job:
        wait_until(lambda: len(losses(tmp_path, 1)) == HOLD_AT, "some steps are done", seconds=90)
        (first,) = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        os.kill(int(first), signal.SIGTERM)
    found = Tiers(root=tmp_path / "checkpoints").latest(skipped=[])
    assert found.manifest.marks.reason.startswith("SIGTERM")

    with training(corpus, tmp_path, environ, within=pod) as again:
        pass
    assert again.returncode == 0
    assert [losses(tmp_path, rank) for rank in (0, 1)] == undisturbed
