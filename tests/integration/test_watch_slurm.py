"""`stoker watch` and Slurm: around `srun`, and below it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster

from stoker.watch import runs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

TRAIN = Path(__file__).parent / "watch" / "programs" / "loop.py"
SRUN = ("srun", "--nodes", "2", "--ntasks", "2", "--quiet")


@pytest.fixture(scope="module")
def cluster(
    require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SlurmCluster]:
    for name in ("munged", "slurmctld", "slurmd", "srun"):
        require_binary(name)
    with slurm_cluster(tmp_path_factory.mktemp("slurm"), max_array_size=2) as cluster:
        yield cluster


@pytest.fixture
def environ(cluster: SlurmCluster) -> dict[str, str]:
    return {name: cluster.environment[name] for name in ("PATH", "SLURM_CONF")} | {"OMP_NUM_THREADS": "1"}


def test_both_ranks_of_srun_are_in_one_run(
    run_stoker: Callable[..., Any], environ: dict[str, str], tmp_path: Path
) -> None:
    watch = ("watch", "--out", tmp_path / "run", "--gpu", "none", "--")
    done = run_stoker(*watch, *SRUN, sys.executable, TRAIN, env=environ)
    assert (done.rc, done.stdout) == (0, "trained\ntrained\n"), done.stderr
    run = runs.read_recording(tmp_path / "run")
    assert [rank.rank for rank in run.ranks] == [0, 1]
    assert [len(rank.steps.end) for rank in run.ranks] == [6, 6]
    assert run.facts["world"] == 2
    assert run.ended == "exit 0"


def test_an_exit_code_comes_through_srun(
    run_stoker: Callable[..., Any], environ: dict[str, str], tmp_path: Path
) -> None:
    watch = ("watch", "--out", tmp_path / "run", "--gpu", "none", "--")
    done = run_stoker(*watch, *SRUN, sys.executable, "-c", "raise SystemExit(7)", env=environ)
    assert done.rc == 7, done.stderr


def test_watchers_that_srun_starts_write_one_run(
    stoker_environ: Callable[..., dict[str, str]], environ: dict[str, str], tmp_path: Path
) -> None:
    watch = (sys.executable, "-m", "stoker.cli", "watch", "--out", tmp_path / "run", "--gpu", "none", "--")
    command = [*SRUN, *watch, sys.executable, TRAIN]
    subprocess.run(command, env=stoker_environ(**environ), cwd=tmp_path, check=True, timeout=100)
    run = runs.read_recording(tmp_path / "run")
    assert [len(rank.steps.end) for rank in run.ranks] == [6, 6]
    assert len(run.hosts) == 1, "one watcher of a machine samples it"
