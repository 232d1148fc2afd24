"""first_rank where there is nobody to meet. Where there is: tests/integration/test_first_rank.py."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stoker
from stoker.errors import FirstRankError, UsageError

LAUNCHERS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def test_a_process_alone_is_the_first_and_needs_no_folder(tmp_path: Path) -> None:
    with stoker.first_rank("work") as first:
        assert first
        first.result = {"path": "/data", "bytes": 12}
    assert first.result == {"path": "/data", "bytes": 12}
    assert list(tmp_path.iterdir()) == []


def test_no_result_is_none() -> None:
    with stoker.first_rank() as first:
        pass
    assert first.result is None


def test_an_unknown_circle_is_said() -> None:
    with pytest.raises(UsageError, match="per='rank'"):
        stoker.first_rank(per="rank")


@pytest.mark.parametrize(
    "result", [Path("/data"), {1: "a"}, (1, 2), {"a": {1}}, "x" * (1 << 20), float("nan")], ids=repr
)
def test_what_is_not_json_is_refused_even_to_a_process_alone(result: object) -> None:
    with pytest.raises(UsageError, match="JSON values of at most 1 MiB"), stoker.first_rank("work") as first:
        first.result = result


def test_an_exception_of_the_block_passes() -> None:
    with pytest.raises(ZeroDivisionError), stoker.first_rank("work"):
        1 / 0  # noqa: B018


def test_a_whole_job_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="needs a folder that all nodes share"):
        stoker.first_rank("work", per="job")


def test_a_job_that_nothing_names_must_be_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"JOB_COMPLETION_INDEX": "0", "STOKER_NODES": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="nothing tells this kubernetes job from another"):
        stoker.first_rank("work", per="job", folder=tmp_path)


def test_a_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / f"stoker-{os.getuid()}").mkdir()
    (tmp_path / f"stoker-{os.getuid()}").chmod(0o777)
    with pytest.raises(UsageError, match="not a folder that only you can write to"):
        stoker.first_rank("work", run="named")


def test_a_first_rank_error_is_a_stoker_error() -> None:
    assert issubclass(FirstRankError, stoker.StokerError)
