"""Worker processes: a dead one is replaced, and its task tried again."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import TaskError
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.local import LocalPool, _held_back_ctrl_c

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration

ENTRY = """
import os, signal, time
from stoker.prepare.launch.ledger import Ledger
from stoker.storage import new_file

def entry(folder, stage, number):
    tries = folder / f"tries-{number}"
    tries.write_text(tries.read_text() + "x" if tries.exists() else "x")
    if stage == "refused":
        raise RuntimeError("no coal")
    if stage == "endless":
        with new_file(folder / "shard") as file:
            os.kill(os.getppid(), signal.SIGUSR1)
            time.sleep(60)
    deaths = {"fine": 0, "dies-once": 1, "dies": 9}[stage] if number == 1 else 0
    if len(tries.read_text()) <= deaths:
        os.kill(os.getpid(), signal.SIGKILL)
    Ledger(folder=folder, plan="p").complete(stage, number, result={"pid": os.getpid()})
"""


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Ledger, list[int]]]:
    """Run four tasks of a stage on two workers."""
    (tmp_path / "an_entry_for_a_pool.py").write_text(ENTRY)
    monkeypatch.syspath_prepend(tmp_path)

    def run(stage: str, workers: int = 2) -> tuple[Ledger, list[int]]:
        ledger, ended = Ledger(folder=tmp_path, plan="p"), []
        with LocalPool(workers, entry="an_entry_for_a_pool:entry") as pool:
            pool.run(ledger, stage, range(4), ended.append)
        return ledger, sorted(ended)

    return run


def test_every_task_runs_and_is_told(ran: Any) -> None:
    ledger, ended = ran("fine")
    assert (ledger.missing("fine", 4), ended) == ([], [0, 1, 2, 3])


def test_a_task_whose_worker_died_is_tried_again(ran: Any, tmp_path: Path) -> None:
    ledger, ended = ran("dies-once")
    assert (ledger.missing("dies-once", 4), ended) == ([], [0, 1, 2, 3])
    assert (tmp_path / "tries-1").read_text() == "xx"


def test_a_task_that_kills_every_worker_fails_and_the_others_are_done(ran: Any) -> None:
    ledger, ended = ran("dies")
    assert (ledger.missing("dies", 4), ended) == ([1], [0, 1, 2, 3])
    assert "SIGKILL" in str(ledger.failure("dies", 1))


def test_a_failure_of_an_earlier_run_is_forgotten_when_tasks_are_tried_again(
    ran: Any, tmp_path: Path
) -> None:
    Ledger(folder=tmp_path, plan="p").fail("refused", 3, TaskError("the disk is full"))
    ledger, ended = ran("refused", workers=1)
    assert ended == [0]
    assert [bool(ledger.failure("refused", number)) for number in range(4)] == [True, False, False, False]


def test_an_interrupted_run_leaves_no_half_written_file(ran: Any, tmp_path: Path) -> None:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            ran("endless", workers=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not list(tmp_path.glob(".shard*"))


def test_ctrl_c_is_heeded_once_a_worker_is_whole() -> None:
    begun, whole = threading.Event(), threading.Event()

    def get_it() -> None:
        begun.wait()
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    def make() -> None:
        with _held_back_ctrl_c():
            begun.set()
            other.join()
            whole.set()

    other = threading.Thread(target=get_it)  # which has nothing blocked
    other.start()
    with pytest.raises(KeyboardInterrupt):
        make()
    assert whole.is_set()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_closing_twice_is_safe() -> None:
    pool = LocalPool(1, entry="stoker.prepare.tasks:run_task")
    pool.close()
    pool.close()


ENDED_WHILE_IMPORTED = """
import os, signal

class Callback:
    def __del__(self):  # as the importer's own are called: what is raised here is printed
        os.kill(os.getpid(), signal.SIGTERM)
        [None for _ in range(1000)]

callback = Callback()
del callback
"""


def test_a_worker_that_is_ended_while_it_imports_prints_no_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ended_while_imported.py").write_text(ENDED_WHILE_IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    pool = LocalPool(1, entry="stoker.prepare.tasks:run_task", preload=["ended_while_imported"])
    (worker,) = pool._workers.values()
    worker.join(30)
    pool.close()
    assert (worker.exitcode, capfd.readouterr().err) == (-signal.SIGTERM, "")


ENDING = """
import atexit, multiprocessing, os, signal
from stoker.prepare.launch.local import _serve

atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))
ours, theirs = multiprocessing.Pipe()
ours.close()
_serve(theirs, "stoker.prepare.tasks:run_task", ())
"""


def test_a_worker_that_is_told_to_leave_while_it_ends_says_nothing(
    stoker_environ: Callable[..., dict[str, str]],
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ENDING], env=stoker_environ(), capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")
