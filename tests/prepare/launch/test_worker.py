"""Running one task: done or failed, it is written down, and the next one runs."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import BadInputError
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.worker import run_task

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(folder=tmp_path, plan="p")


def refuse(folder: Path, stage: str, number: int) -> None:
    raise BadInputError("a.jsonl at byte 5 is bad", hint="mend it")


def crash(folder: Path, stage: str, number: int) -> None:
    raise ZeroDivisionError("boom")


def test_a_failed_task_says_why(ledger: Ledger) -> None:
    run_task(refuse, ledger, "map", 3)
    assert str(ledger.failure("map", 3)) == "a.jsonl at byte 5 is bad\nhint: mend it"


def test_a_reason_with_a_name_that_is_no_utf8_is_written_down(ledger: Ledger) -> None:
    name = os.fsdecode(b"caf\xe9.jsonl")

    def refuse_it(folder: Path, stage: str, number: int) -> None:
        raise BadInputError(f"{name} is bad")

    run_task(refuse_it, ledger, "map", 3)
    assert str(ledger.failure("map", 3)) == f"{name} is bad"
    assert r"caf\udce9.jsonl is bad" in ledger.log("map", 3).read_text()


def test_a_bug_is_named_and_its_trace_logged(ledger: Ledger) -> None:
    failure = run_task(crash, ledger, "map", 3)
    assert failure is not None
    assert failure.message == "ZeroDivisionError: boom"
    assert "Traceback" in ledger.log("map", 3).read_text()


def test_a_reason_that_cannot_be_written_down_is_printed(
    ledger: Ledger, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    run_task(refuse, ledger, "map", 3)
    assert "map 3: a.jsonl at byte 5 is bad" in capsys.readouterr().err


ENTRY = """
def entry(folder, stage, number):
    from stoker.prepare.launch.ledger import Ledger
    if number == 2:
        raise ValueError("two is bad")
    Ledger(folder=folder, plan="p").complete(stage, number, result={"number": number})
"""


def test_the_worker_program_runs_its_slot_and_tells_of_a_failure(
    ledger: Ledger, stoker_environ: Any, tmp_path: Path
) -> None:
    (tmp_path / "an_entry.py").write_text(ENTRY)
    (tmp_path / "todo").write_text("0\n1\n2\n3\n4\n")
    command = [sys.executable, "-m", "stoker.prepare.launch.worker", "an_entry:entry", str(tmp_path), "map"]
    ran = subprocess.run(
        [*command, "--plan", "p", "--slot", "0/2", "--todo", str(tmp_path / "todo")],
        env=stoker_environ(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (ran.returncode, "map 2 failed: ValueError: two is bad" in ran.stderr) == (1, True)
    assert ledger.missing("map", 5) == [1, 2, 3]
