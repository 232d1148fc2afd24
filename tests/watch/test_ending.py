"""How a run ended, in one line."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import pytest

from stoker.diagnose.rules import diagnose
from stoker.watch.command import Options, watch
from stoker.watch.ending import ending
from stoker.watch.exits import Exit
from stoker.watch.inside.exceptions import say_exception
from stoker.watch.inside.probe import Probe
from stoker.watch.runs import read_recording
from stoker.watch.runs.files import Events, write_meta

if TYPE_CHECKING:
    from pathlib import Path


def end(folder: Path, status: int, *, oom_kills: int = 0) -> str:
    return ending(status, folder=folder, pid=1 << 30, oom_kills=oom_kills).line


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


def test_the_rank_that_went_first_is_named_and_not_its_victims(tmp_path: Path) -> None:
    for rank, pid in enumerate((10, 11, 12)):
        write_meta(tmp_path / f"proc-a-{pid}.json", {"pid": pid, "rank": rank})
    gone = [
        Exit(pid=pid, t=t, status=status, worker=False) for pid, t, status in ((11, 5.0, -9), (10, 5.2, -15))
    ]
    found = ending(1, folder=tmp_path, pid=1 << 30, oom_kills=0, exits=gone)
    assert (found.kind, found.cause, found.rank) == ("crashed", "signal", 1)
    assert found.line == "exit 1: rank 1 killed by SIGKILL"


def test_ranks_that_nobody_saw_die_are_victims_where_the_launcher_knows_the_signal(tmp_path: Path) -> None:
    """mp.spawn waits for a rank before we can look; it then ends the others, and says whose signal it was."""
    for rank, pid in enumerate((10, 11)):
        write_meta(tmp_path / f"proc-a-{pid}.json", {"pid": pid, "rank": rank})
    text = "ProcessExitedException: process 0 terminated with signal SIGTERM"
    Events(tmp_path / "events-a-9.jsonl").say("exception", text, rank=0, signal="SIGTERM")
    gone = [Exit(pid=pid, t=5.0, status=None, worker=False) for pid in (10, 11)]
    found = ending(1, folder=tmp_path, pid=1 << 30, oom_kills=0, exits=gone)
    assert (found.kind, found.cause) == ("preempted", "signal"), found


def test_what_a_loaders_worker_raised_is_told_in_its_own_words_with_its_line(tmp_path: Path) -> None:
    program = tmp_path / "dataset.py"
    lines = [
        "Caught OSError in DataLoader worker process 3.",
        "Original Traceback (most recent call last):",
        f'  File "{program}", line 9, in load',
        '    raise OSError("no such image")',
        "OSError: no such image",
    ]
    say_exception(Probe(tmp_path), OSError("\n".join(lines)))
    found = ending(1, folder=tmp_path, pid=1 << 30, oom_kills=0)
    assert found.text == "OSError: no such image (in loader worker 3)"
    assert found.where == f"{program}:9 load"


ENDS = {
    "caught": "try: train()\nexcept ValueError: sys.exit(1)",
    "told": "try: train()\nexcept ValueError as error: sys.exit(f'gave up: {error}')",
    "thread": "thread = threading.Thread(target=train); thread.start(); thread.join()",
}
TRAIN = """
import sys, threading, torch
def train():
    weight = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        (weight * 2).sum().backward()
        optimizer.step()
    raise ValueError("loss is nan")
"""


@pytest.mark.long
@pytest.mark.parametrize(("how", "status"), [("caught", 1), ("told", 1), ("thread", 0)])
def test_an_exception_that_never_reached_the_interpreter_is_still_why_it_ended(
    how: str, status: int, tmp_path: Path
) -> None:
    """Caught and turned into an exit code, as Hydra does; or it ended the loop's thread, and the process left
    with 0."""
    program = tmp_path / "train.py"
    program.write_text(TRAIN + ENDS[how])
    assert watch([sys.executable, str(program)], Options(folder=tmp_path / "run", gpu="none")) == status
    found = diagnose(read_recording(tmp_path / "run")).findings[0]
    assert (found.kind, found.cause) == ("crashed", "exception")
    assert "ValueError: loss is nan" in found.summary
    assert f"{program}:9 train" in found.summary


def test_a_signal_from_outside_is_a_preemption_and_ctrl_c_an_interruption(tmp_path: Path) -> None:
    for number, kind in ((signal.SIGTERM, "preempted"), (signal.SIGINT, "interrupted")):
        for status in (0, 1, -number):
            found = ending(status, folder=tmp_path, pid=1 << 30, oom_kills=0, signals=[(1.0, number)])
            assert found.kind == kind


def test_an_exception_keeps_what_it_came_from(tmp_path: Path) -> None:
    try:
        try:
            raise KeyError("inner")
        except KeyError as cause:
            raise ValueError("outer") from cause
    except ValueError as error:
        say_exception(Probe(tmp_path), error)
    found = ending(1, folder=tmp_path, pid=1 << 30, oom_kills=0)
    assert (found.kind, found.cause, found.chain) == ("crashed", "exception", ("KeyError: 'inner'",))
    assert "test_ending.py" in found.where
