"""A real job, killed five times with SIGKILL and started again: its account against its own log."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stoker.history.goodput.account import Account, account
from stoker.history.goodput.attempts import read_attempts, same_job
from stoker.processes import lives
from stoker.watch.runs import read_recording

pytestmark = pytest.mark.integration
JOB = Path(__file__).parents[2] / "history" / "programs" / "requeued_job.py"
KILLS = (27, 55, 61, 95, 128)  # after which step the process is killed; 61: before a save of its own
STEPS = 150


@dataclass(frozen=True)
class Requeued:
    runs: Path
    truth: dict[str, float]
    resumed: list[int]  # at which step each restart went on, as it wrote down itself
    wall_s: float


@pytest.fixture(scope="module")
def requeued(
    tmp_path_factory: pytest.TempPathFactory, stoker_environ: Callable[..., dict[str, str]]
) -> Requeued:
    base = tmp_path_factory.mktemp("requeued")
    log = base / "log.jsonl"
    ended = [_attempt(base, number, kill, stoker_environ) for number, kill in enumerate((*KILLS, None))]
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    truth = true_account(rows, ended)
    resumed = [row["step"] for row in rows if row["what"] == "restore"][1:]
    return Requeued(runs=base / "runs", truth=truth, resumed=resumed, wall_s=sum(truth.values()))


def _attempt(base: Path, number: int, kill: int | None, environ: Callable[..., dict[str, str]]) -> float:
    """One submission; gives when the process was gone."""
    command = [
        sys.executable,
        "-m",
        "stoker.cli",
        "watch",
        "--gpu",
        "none",
        "--out",
        base / "runs" / str(number),
    ]
    child = subprocess.Popen(
        [
            *map(str, command),
            "--",
            sys.executable,
            str(JOB),
            str(base / "ckpt"),
            str(base / "log.jsonl"),
            str(STEPS),
        ],
        env=environ(STOKER_JOB="requeued", STOKER_HISTORY=str(base / "history")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    if kill is None:
        pid = _until(base / "log.jsonl", lambda row: row.get("number") == STEPS, child)["pid"]
        while lives(pid):  # the watcher goes on for a moment, to say what it saw
            time.sleep(0.005)
        gone = time.time()
        assert child.wait(timeout=120) == 0
        return gone
    row = _until(base / "log.jsonl", lambda row: row.get("number") == kill, child)
    os.kill(row["pid"], signal.SIGKILL)
    gone = time.time()
    assert child.wait(timeout=120) == 128 + signal.SIGKILL
    return gone


def _until(
    log: Path, wanted: Callable[[dict[str, Any]], bool], child: subprocess.Popen[bytes]
) -> dict[str, Any]:
    while True:
        lines = log.read_text().splitlines() if log.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        found = [row for row in rows if wanted(row)]
        if found:
            return found[-1]
        assert child.poll() is None, "it ended before it was to be killed"
        time.sleep(0.005)


def true_account(rows: list[dict[str, Any]], gone: list[float]) -> dict[str, float]:
    """From the job's own log: what it spent on what, and which steps it had to do again."""
    starts = [row["start"] for row in rows if row["what"] == "process"]
    restored = [row for row in rows if row["what"] == "restore"]
    found = dict.fromkeys(
        ("productive", "startup", "restore", "repeated", "starved", "saving", "down", "ending"), 0.0
    )
    for number, began in enumerate(starts):
        mine = [row for row in rows if row["what"] == "step" and began <= row["start"] < gone[number]]
        resumed = min((row["step"] for row in restored[number + 1 :]), default=STEPS)
        first = mine[0]["start"]
        found["restore"] += restored[number]["end"] - restored[number]["start"] - 0.2  # its sleep is start-up
        found["startup"] += first - began - (restored[number]["end"] - restored[number]["start"] - 0.2)
        for row in mine:
            saving = row["end"] - row["computed"] if row["saved"] else 0.0
            found["saving"] += saving
            kept = row["number"] <= resumed
            found["starved" if kept else "repeated"] += row["fetched"] - row["start"]
            found["productive" if kept else "repeated"] += row["end"] - row["fetched"] - saving
        found["ending" if number == len(starts) - 1 else "repeated"] += gone[number] - mine[-1]["end"]
        if number + 1 < len(starts):
            found["down"] += starts[number + 1] - gone[number]
    return found


def accounted(requeued: Requeued) -> Account:
    folders = sorted(requeued.runs.glob("*/"))
    attempts = [one for folder in folders for one in read_attempts(folder, read_recording(folder))]
    (job,) = same_job(attempts)
    return account(job)


def test_every_account_is_within_one_percent_of_the_truth(requeued: Requeued) -> None:
    found = accounted(requeued)
    off = {name: (found.seconds[name] - true) / requeued.wall_s for name, true in requeued.truth.items()}
    assert {name: share for name, share in off.items() if abs(share) > 0.01} == {}, (off, found.seconds)


def test_the_accounts_sum_to_the_wall_time(requeued: Requeued) -> None:
    found = accounted(requeued)
    assert sum(found.seconds.values()) == pytest.approx(found.wall_s, rel=1e-6)


def test_each_restart_is_named_with_the_step_it_resumed_from(requeued: Requeued) -> None:
    found = accounted(requeued)
    assert [one.resumed.split(",")[0] for one in found.restarts] == [
        f"step {one}" for one in requeued.resumed
    ]
    assert len(requeued.resumed) == len(KILLS)
    assert requeued.resumed[0] >= 20
    assert all(one.repeated_s > 0 and one.ended == "killed by SIGKILL" for one in found.restarts)


def test_the_command_tells_the_same_story(requeued: Requeued, run_stoker: Callable[..., Any]) -> None:
    environ = {"STOKER_HISTORY": str(requeued.runs.parent / "history")}
    ran = run_stoker("history", "goodput", "requeued", "--json", env=environ)
    assert ran.rc == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["seconds"]["productive"] == pytest.approx(accounted(requeued).seconds["productive"], rel=1e-6)
    assert len(told["restarts"]) == len(KILLS)
    assert "restart 5" in run_stoker("history", "goodput", "requeued", env=environ).stdout
