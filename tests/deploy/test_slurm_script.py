"""The batch script itself, run by bash with stand-ins for srun and scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from small_jobs import deployment

from stoker.deploy.slurm import slurm_files
from stoker.deploy.write import write_files

SRUN = """#!/bin/bash
step=training left=0
[[ $* == *prolog.sh* ]] && step=staging left=138
trap 'exit $left' USR1 TERM
touch "$SLURM_SUBMIT_DIR/$step"
while [ ! -e "$SLURM_SUBMIT_DIR/$step-done" ]; do sleep 0.02; done
"""
SCONTROL = """#!/bin/bash
echo "$1" >> "$SLURM_SUBMIT_DIR/asked"
[ "$1" = requeue ] || cat "$SLURM_SUBMIT_DIR/state"
"""


@contextmanager
def batch_script(folder: Path, *, staged: bool, state: str) -> Iterator[subprocess.Popen[str]]:
    """train.sbatch under way, in a job of this state."""
    for name, text in (
        ("bin/srun", SRUN),
        ("bin/scontrol", SCONTROL),
        ("slurm/state", f"JobState={state} Restarts=0 "),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    if staged:
        (folder / "slurm/staging-done").touch()
    slurm = folder / "slurm"
    (folder / "files").mkdir()
    write_files(folder / "files", slurm_files(deployment()))
    environment = {**os.environ, "SLURM_SUBMIT_DIR": str(slurm), "SLURM_JOB_ID": "7"}
    environment["PATH"] = f"{folder / 'bin'}:{environment['PATH']}"
    script = subprocess.Popen(
        ["bash", folder / "files/train.sbatch"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield script
    finally:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)  # the sleep that a script leaves to Slurm
        script.communicate()


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("staged", [False, True])
def test_a_warning_brings_the_job_back_also_while_it_stages(tmp_path: Path, staged: bool) -> None:
    with batch_script(tmp_path, staged=staged, state="RUNNING") as script:
        wait_until((tmp_path / "slurm" / ("training" if staged else "staging")).exists)
        script.send_signal(signal.SIGUSR1)
        assert script.wait(30) == 0
        assert (tmp_path / "slurm/asked").read_text().split() == ["show", "requeue"]
        assert (tmp_path / "slurm/training").exists() == staged


def test_a_job_that_was_cancelled_stays_away(tmp_path: Path) -> None:
    with batch_script(tmp_path, staged=True, state="COMPLETING") as script:
        wait_until((tmp_path / "slurm/training").exists)
        script.send_signal(signal.SIGTERM)
        assert script.wait(30) == 0
        assert (tmp_path / "slurm/asked").read_text().split() == ["show"]


def test_a_job_that_ends_by_itself_has_the_exit_code_of_its_step(tmp_path: Path) -> None:
    with batch_script(tmp_path, staged=True, state="RUNNING") as script:
        wait_until((tmp_path / "slurm/training").exists)
        (tmp_path / "slurm/training-done").touch()
        assert script.wait(30) == 0
        assert not (tmp_path / "slurm/asked").exists()


def test_a_script_that_outlives_its_run_leaves_the_next_one_alone(tmp_path: Path) -> None:
    with batch_script(tmp_path, staged=True, state="RUNNING") as script:
        wait_until((tmp_path / "slurm/training").exists)
        (tmp_path / "slurm/state").write_text("JobState=RUNNING Restarts=1 ")
        script.send_signal(signal.SIGUSR1)
        assert script.wait(30) == 0
        assert (tmp_path / "slurm/asked").read_text().split() == ["show"]


def test_steps_of_a_container_see_the_folders_that_the_scripts_name() -> None:
    one = deployment(container="registry.site#ai/train:1", cache="/nvme/a_b+c")
    script = slurm_files(one)["train.sbatch"]
    line = next(line for line in script.splitlines() if line.startswith("container="))
    said = subprocess.run(
        ["bash", "-euc", f'here=/home/me/slurm; {line}; printf "%s\\n" "${{container[@]}}"'],
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.splitlines() == [
        "--container-image=registry.site#ai/train:1",
        "--container-mounts=/home/me/slurm:/home/me/slurm,/nvme/a_b+c:/nvme/a_b+c,/shared:/shared",
        "--container-workdir=/home/me/slurm",
        "--no-container-mount-home",
    ]
    assert script.count('"${container[@]}"') == 2
