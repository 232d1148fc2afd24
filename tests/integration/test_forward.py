"""What pods run around torchrun: ranks have their grace, and who was sent away has not succeeded."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from clusters import wait_until

pytestmark = pytest.mark.integration

RANK = """
import os, pathlib, signal, sys, threading
warned = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: warned.set())
here, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
(here / f"trains-{rank}").touch()
warned.wait()
(here / f"warned-{rank}").touch()
while not (here / "go").exists():
    threading.Event().wait(0.05)
(here / f"saved-{rank}").touch()
"""


@contextmanager
def pod(folder: Path, *command: str, patience: str = "100") -> Iterator[subprocess.Popen[bytes]]:
    forward = [sys.executable, "-m", "stoker.deploy.forward", "--patience", patience]
    # a torchrun that kills ranks a second after it hears of a signal: it must not hear of it
    environ = {**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*forward, *command], env=environ, cwd=folder, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def torchrun(folder: Path) -> tuple[str, ...]:
    (folder / "rank.py").write_text(RANK)
    return (
        *("--", sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-port=0"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "rank.py", str(folder)),
    )


def both(folder: Path, what: str) -> bool:
    return all((folder / f"{what}-{rank}").exists() for rank in (0, 1))


def test_ranks_save_for_longer_than_torchrun_would_wait_and_the_pod_has_not_succeeded(tmp_path: Path) -> None:
    with pod(tmp_path, *torchrun(tmp_path)) as process:
        wait_until(lambda: both(tmp_path, "trains"), "the ranks train", seconds=90)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: both(tmp_path, "warned"), "the ranks are warned")
        (tmp_path / "go").touch()
        assert process.wait(60) == 143  # though torchrun and both ranks ended with 0
        assert both(tmp_path, "saved")


def test_ranks_that_do_not_leave_are_ended_when_patience_is_over(tmp_path: Path) -> None:
    with pod(tmp_path, *torchrun(tmp_path), patience="1") as process:
        wait_until(lambda: both(tmp_path, "trains"), "the ranks train", seconds=90)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
        assert not both(tmp_path, "saved")


RETRYABLE = ("--failed", "138")


@pytest.mark.parametrize(
    ("options", "code", "seen"), [((), 0, 0), ((), 7, 7), (RETRYABLE, 7, 138), (RETRYABLE, 0, 0)]
)
def test_a_command_that_ends_by_itself_has_its_code(
    tmp_path: Path, options: tuple[str, ...], code: int, seen: int
) -> None:
    with pod(tmp_path, *options, "--", sys.executable, "-c", f"raise SystemExit({code})") as process:
        assert process.wait(60) == seen


def test_a_command_without_ranks_gets_the_signal_itself(tmp_path: Path) -> None:
    script = f"import pathlib, time; pathlib.Path({str(tmp_path / 'up')!r}).touch(); time.sleep(100)"
    with pod(tmp_path, "--", sys.executable, "-c", script) as process:
        wait_until((tmp_path / "up").exists, "it runs")
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
