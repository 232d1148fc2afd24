"""Who samples a machine when several watchers share a run: one at a time, and the next when that is gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from stoker.watch import runs
from stoker.watch.claims import Claim
from stoker.watch.sampler import Sampler

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_a_claim_is_one_holders_until_it_lets_go(tmp_path: Path) -> None:
    first, second = Claim(tmp_path / "claim"), Claim(tmp_path / "claim")
    assert first.take()
    assert first.take(), "asked again"
    assert not second.take()
    first.release()
    first.release()
    assert second.take()
    second.release()


def test_a_killed_holders_claim_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from stoker.watch.claims import Claim\n"
        "claim = Claim(Path(sys.argv[1])); assert claim.take(); print('held', flush=True); time.sleep(600)"
    )
    path = tmp_path / "claim"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        mine = Claim(path)
        assert not mine.take()
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    assert mine.take()
    mine.release()


@pytest.mark.long
def test_the_next_watcher_goes_on_where_the_one_that_sampled_was_killed(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    def started(task: int, seconds: str) -> subprocess.Popen[bytes]:
        slurm = {"JOB_ID": "7", "STEP_ID": "0", "NTASKS": "2", "STEP_NUM_TASKS": "2"}
        mine = {"PROCID": str(task), "LOCALID": str(task)}
        environ = stoker_environ(**{f"SLURM_{name}": value for name, value in (slurm | mine).items()})
        watch = [sys.executable, "-m", "stoker.cli", "watch", "--gpu", "none", "--hz", "20", "--out", "run"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*watch, "--", "sleep", seconds], cwd=tmp_path, env=environ, **quiet)

    def size() -> int:
        return sum(path.stat().st_size for path in (tmp_path / "run").glob("host-*.rows"))

    with started(0, "600") as first:
        wait_for(lambda: (tmp_path / "run").is_dir() and size() > 2000)
        with started(1, "600") as second:
            wait_for(lambda: len(list((tmp_path / "run").glob("node-*.json"))) == 2)
            children = subprocess.run(["pgrep", "-P", str(first.pid)], capture_output=True, text=True).stdout
            os.kill(first.pid, signal.SIGKILL)
            first.wait()
            for child in children.split():
                os.kill(int(child), signal.SIGKILL)
            before = size()
            wait_for(lambda: size() > before + 2000)
            os.kill(second.pid, signal.SIGTERM)
            second.wait()
    assert len(runs.read_recording(tmp_path / "run").hosts) == 1, "one machine, whoever sampled it"


def test_what_fails_once_leaves_a_gap_and_is_read_again(tmp_path: Path) -> None:
    class Cards:
        def __init__(self) -> None:
            self.asked = 0

        def read(self, t: float) -> dict[int, dict[str, float]]:
            self.asked += 1
            if self.asked == 2:
                raise RuntimeError("GPU is lost")
            return {0: {"util": 50.0}}

        def close(self) -> None: ...

    cards, said = Cards(), list[str]()
    with Sampler(tmp_path, node="a", hz=50, cards=cards, pids=list, on_missing=said.append):
        wait_for(lambda: cards.asked >= 5)
    assert len(said) == 1
    assert "GPU is lost" in said[0]


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)
