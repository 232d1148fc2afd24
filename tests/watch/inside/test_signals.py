"""SIGTERM that a program heeds itself: noted, and the program sees its own handlers as ever."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, Any

from stoker.diagnose.rules import diagnose
from stoker.watch import runs
from stoker.watch.ending import ending
from stoker.watch.runs.files import Events, write_meta

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

PROGRAM = """
import os, signal, sys
def stop(number, frame):
    global over
    over = True
over = False
{early}
import torch
{late}
assert signal.getsignal(signal.SIGTERM) is stop
assert signal.signal(signal.SIGTERM, stop) is stop
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(50):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if step == 20:
        os.kill(os.getpid(), signal.SIGTERM)
    if over:
        break
print("saved", step)
"""
SET = "signal.signal(signal.SIGTERM, stop)"


def test_a_job_that_heeds_sigterm_and_leaves_with_0_was_told_to_end(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    for number, places in enumerate([{"early": SET, "late": ""}, {"early": "", "late": SET}]):
        (tmp_path / "program.py").write_text(PROGRAM.format(**places))
        out = f"run{number}"
        done = run_stoker("watch", "--gpu", "none", "--out", out, "--", sys.executable, "program.py")
        assert (done.rc, done.stdout) == (0, "saved 20\n"), done.stderr
        findings = diagnose(runs.read_recording(tmp_path / out)).findings
        assert [(one.kind, one.cause) for one in findings[:1]] == [("preempted", "signal")]


def test_a_helper_that_is_ended_so_is_no_preemption_of_the_job(tmp_path: Path) -> None:
    for pid in (10, 11):
        write_meta(tmp_path / f"proc-a-{pid}.json", {"pid": pid, "rank": 0})
    Events(tmp_path / "events-a-11.jsonl").say("signal", "SIGTERM", number=int(signal.SIGTERM))
    assert ending(0, folder=tmp_path, pid=1 << 30, oom_kills=0).kind == ""
    Events(tmp_path / "events-a-10.jsonl").say("signal", "SIGTERM", number=int(signal.SIGTERM))
    assert ending(0, folder=tmp_path, pid=1 << 30, oom_kills=0).kind == "preempted"
