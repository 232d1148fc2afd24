"""Completion markers: bound to their plan and to the files they name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.errors import TaskError
from stoker.manifest import FileRecord
from stoker.prepare.launch.ledger import Ledger

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(folder=tmp_path, plan="plan-a")


def test_an_unmarked_task_is_missing(ledger: Ledger) -> None:
    assert (ledger.result("map", 0), ledger.missing("map", 2)) == (None, [0, 1])


def test_a_marked_task_gives_its_result(ledger: Ledger) -> None:
    ledger.complete("map", 1, result={"tokens": 5})
    assert (ledger.result("map", 1), ledger.missing("map", 2)) == ({"tokens": 5}, [0])


def test_a_marker_of_another_plan_does_not_count(ledger: Ledger, tmp_path: Path) -> None:
    ledger.complete("map", 0, result={})
    assert Ledger(folder=tmp_path, plan="plan-b").result("map", 0) is None


@pytest.mark.parametrize("content", [None, b"", b"too short"], ids=["gone", "empty", "cut"])
def test_a_marker_whose_file_is_not_whole_does_not_count(
    content: bytes | None, ledger: Ledger, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "x").write_bytes(content)
    ledger.complete("map", 0, result={}, files=[FileRecord(name="x", bytes=100, xxh3="")])
    assert ledger.result("map", 0) is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"plan": "plan-a"'])
def test_a_torn_marker_does_not_count(content: bytes, ledger: Ledger, tmp_path: Path) -> None:
    ledger.complete("map", 0, result={})
    (path,) = (tmp_path / "done").iterdir()
    path.write_bytes(content)
    assert ledger.result("map", 0) is None


def test_a_failure_is_told_until_the_task_succeeds(ledger: Ledger) -> None:
    ledger.fail("map", 0, TaskError("no luck", hint="try again"))
    before = ledger.failure("map", 0)
    ledger.complete("map", 0, result={})
    assert (str(before), ledger.failure("map", 0)) == ("no luck\nhint: try again", None)


def test_a_file_that_the_disk_cannot_read_is_made_again(ledger: Ledger, tmp_path: Path) -> None:
    (tmp_path / "made").symlink_to("/proc/self/mem")  # to read its first byte is an I/O error, for everyone
    ledger.complete("map", 0, result={}, files=[FileRecord(name="made", bytes=0, xxh3="0")])
    assert ledger.recheck("map", [0]) == [0]
    assert ledger.missing("map", 1) == [0]
