"""What is submitted to Slurm, and how its answers are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import StokerError
from stoker.prepare.launch import sbatch
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.slurm import SlurmArray

FOLDER = Path("/shared/out/.stoker-0123456789abcdef")


def _array(**given: object) -> sbatch.Submission:
    defaults = {"name": "stoker-map-1", "elements": 4, "at_once": 0, "log": FOLDER / "slurm/map-%A_%a.log"}
    return sbatch.array_submission(**{"worker": ["python", "-m", "w"], "options": (), **defaults, **given})  # type: ignore[arg-type]


@given(tasks=st.integers(1, 3000), limit=st.integers(1, 1001))
def test_every_task_belongs_to_one_element_and_no_array_is_too_large(tasks: int, limit: int) -> None:
    elements = sbatch.element_count(tasks, max_array_size=limit)
    numbers = list(range(tasks))
    shares = [numbers[slot::elements] for slot in range(elements)]
    assert elements <= limit
    assert all(shares), "an element has nothing to do"
    assert sorted(number for share in shares for number in share) == numbers


def test_an_element_learns_its_slot_from_slurm() -> None:
    assert _array().text().endswith('\nexec python -m w --slot "$SLURM_ARRAY_TASK_ID/4"\n')


def test_as_many_elements_run_at_once_as_asked_for() -> None:
    assert "--array=0-3" in _array().options
    assert "--array=0-3%2" in _array(at_once=2).options


def test_what_a_user_asks_for_comes_after_defaults_and_before_what_must_hold() -> None:
    options = _array(options=["--no-requeue", "-p cpu --job-name=mine"]).options
    assert options.index("--requeue") < options.index("--no-requeue")
    assert options.index("--job-name=mine") < options.index("--job-name=stoker-map-1")
    assert options[options.index("-p") + 1] == "cpu"


def test_a_percent_sign_in_a_folder_is_not_taken_for_a_pattern() -> None:
    options = _array(log=Path("/data/50%a/map-%A_%a.log")).options
    assert "--output=/data/50%%a/map-%A_%a.log" in options


def test_a_later_job_waits_for_the_end_of_the_earlier_ones_whatever_it_is() -> None:
    assert "--dependency=afterany:12:13" in sbatch.after(_array(), ["12", "13"]).options
    assert sbatch.after(_array(), []) == _array()


def test_jobs_of_two_folders_have_two_names() -> None:
    assert sbatch.job_name(FOLDER, "map") != sbatch.job_name(Path("/elsewhere") / FOLDER.name, "map")


def test_the_answers_of_slurm_are_read() -> None:
    assert sbatch.parse_job_id("12;cluster\n") == "12"
    assert sbatch.parse_max_array_size("MaxArraySize            = 1001\nMaxJobCount = 10000\n") == 1001
    running, pending = sbatch.parse_queue("12|0|RUNNING|None\n12|1|PENDING|Resources\n")
    (ended,) = sbatch.parse_queue("12|2|OUT_OF_MEMORY|OutOfMemory\n")
    assert (running.index, running.is_over, ended.is_over) == ("0", False, True)
    assert sbatch.holding_reason([pending, ended]) == "Resources"
    assert sbatch.holding_reason([running, pending]) == ""


def test_what_a_site_prints_beside_the_answers_is_passed_over() -> None:
    assert sbatch.parse_job_id("--- Welcome to Rheingold ---\n--> quota: OK\n\n12\n") == "12"
    (element,) = sbatch.parse_queue("maintenance on Monday\n12|0|RUNNING|None\n\n")
    assert element.job == "12"


def test_a_config_without_maxarraysize_is_refused() -> None:
    with pytest.raises(StokerError, match="MaxArraySize"):
        sbatch.parse_max_array_size("slurm_load_ctl_conf error\n")


def test_without_slurm_commands_the_error_says_where_to_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    launcher = SlurmArray(entry="stoker.prepare.tasks:run_task")
    with pytest.raises(StokerError, match="squeue is not on the PATH") as caught:
        launcher.run(Ledger(folder=tmp_path, plan="0"), "map", [0], print)
    assert "login node" in caught.value.hint


def test_what_a_user_has_squeue_leave_out_is_seen_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squeue = tmp_path / "squeue"
    squeue.write_text('#!/bin/sh\n[ "$SQUEUE_USERS" ] || echo "12|N/A|RUNNING|None"\n')
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("SQUEUE_USERS", "somebody")
    with pytest.raises(StokerError, match="its last job is 12"):
        SlurmArray(entry="x:y").run(Ledger(folder=tmp_path, plan="0"), "map", [0], print)
