"""Nightly runs: a script that runs as written, and files that clusters take."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from strict import validate

from stoker.cli.deploy import command
from stoker.deploy.nightly import Nightly, github_nightly, kubernetes_nightly, script, slurm_nightly
from stoker.errors import UsageError
from stoker.history.store import read_store

JOB = ("python", "train.py", "--name", "it's $HOME")


def test_scrontab_has_options_and_then_when_and_what() -> None:
    lines = slurm_nightly(Nightly(command=JOB, at="3:05", partition="h200"))["scrontab"].splitlines()
    assert lines[-1] == "5 3 * * * /shared/nightly/nightly.sh"
    assert "#SCRON --partition=h200" in lines
    assert all(line.startswith("#SCRON --") for line in lines[:-1])


@pytest.mark.integration  # with a validator and schemas of others
def test_the_cron_job_is_valid_and_its_script_is_not_expanded_by_the_kubelet() -> None:
    (made,) = kubernetes_nightly(Nightly(command=JOB, image="i", time_limit="1-00:00:00")).values()
    each = yaml.safe_load(made)
    validate(each)
    job = each["spec"]["jobTemplate"]["spec"]
    assert job["activeDeadlineSeconds"] == 86400
    assert "$$(date" in job["template"]["spec"]["containers"][0]["command"][2]


def test_the_workflow_runs_the_script_and_shows_the_page() -> None:
    made = github_nightly(Nightly(command=JOB))
    flow = yaml.safe_load(made[".github/workflows/nightly.yml"])
    assert "schedule" in (flow.get("on") or flow[True])
    assert ".github/nightly.sh" in made


@pytest.mark.parametrize(
    "bad", [{"command": ()}, {"name": "A b"}, {"at": "25:00"}, {"shared": "a\nb"}, {"time_limit": "soon"}]
)
def test_what_cannot_work_is_refused_with_a_hint(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="hint:"):
        kubernetes_nightly(Nightly(**{"command": JOB, "image": "i", **bad}))


def test_an_image_is_asked_for() -> None:
    with pytest.raises(UsageError, match="image"):
        kubernetes_nightly(Nightly(command=JOB))


def test_the_command_writes_the_files(tmp_path: Path) -> None:
    ran = CliRunner().invoke(command, ["nightly", "slurm", "--out", str(tmp_path / "n"), "--", *JOB])
    assert ran.exit_code == 0, ran.output
    assert os.access(tmp_path / "n" / "nightly.sh", os.X_OK)
    assert (tmp_path / "n" / "scrontab").exists()


@pytest.mark.integration
@pytest.mark.parametrize(("ends", "expected"), [(0, 0), (3, 3)])
def test_the_script_records_and_checks_and_gives_the_jobs_exit_code(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]], ends: int, expected: int
) -> None:
    """With a folder that a shell would take apart, and another command after the job."""
    shared = tmp_path / "a $b 'c'"
    shared.mkdir()
    one = Nightly(
        command=(sys.executable, "-c", f"import sys; sys.exit({ends})"),
        shared=str(shared),
        folder=str(tmp_path),
        also=("touch also",),
    )
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "stoker").write_text(f'#!/bin/sh\nexec {sys.executable} -m stoker.cli "$@"\n')
    (programs / "stoker").chmod(0o755)
    environ = stoker_environ(PATH=f"{programs}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "-c", script(one)], env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == expected, done.stderr
    (entry,) = read_store(shared / "history.db").entries
    assert entry.title == "nightly"
    assert (tmp_path / "also").exists()
