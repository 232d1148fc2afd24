"""How a run ended, in one line."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest

from stoker.observe.ending import ending
from stoker.observe.hooks import say_exception
from stoker.observe.probe import Probe
from stoker.runs.files import Events

if TYPE_CHECKING:
    from pathlib import Path


def end(folder: Path, status: int, *, oom_kills: int = 0) -> str:
    return ending(status, folder=folder, pid=1 << 30, oom_kills=oom_kills)


def test_a_plain_end_is_its_code_or_signal(tmp_path: Path) -> None:
    assert end(tmp_path, 0) == "exit 0"
    assert end(tmp_path, 3) == "exit 3"
    assert end(tmp_path, -signal.SIGSEGV) == "killed by SIGSEGV"


def test_a_kill_for_memory_is_told_from_other_kills(tmp_path: Path) -> None:
    assert end(tmp_path, -signal.SIGKILL, oom_kills=1) == "killed by SIGKILL: out of memory (cgroup)"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("DataLoader worker (pid 7) is killed by signal: Bus error. It …", "loader worker killed by SIGBUS"),
        ("DataLoader worker (pid 7) is killed by signal: Killed. ", "loader worker killed by SIGKILL"),
        ("train.py FAILED\n exitcode  : -11 (pid: 5)", "a process killed by SIGSEGV"),
        ("out of  luck", "RuntimeError: out of luck"),
    ],
)  # fmt: skip
def test_what_a_process_died_of_is_the_cause(tmp_path: Path, text: str, cause: str) -> None:
    say_exception(Probe(tmp_path), RuntimeError(text))
    assert end(tmp_path, 1) == f"exit 1: {cause}"


def test_an_abort_after_a_hang_in_a_collective_names_it(tmp_path: Path) -> None:
    Events(tmp_path / "events-a-1.jsonl").say("hang", "", in_collective=True, collective_op="all_reduce")
    assert end(tmp_path, -signal.SIGABRT) == "killed by SIGABRT: hung in all_reduce"
