"""Leaving together: signals become one step after which all ranks leave, and go back to whose they were."""

from __future__ import annotations

import multiprocessing
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest
import torch

from stoker.checkpoint.board import TcpBoard
from stoker.checkpoint.leave import Leaving, Notice
from stoker.checkpoint.saved.layout import parse_manifest
from stoker.errors import UsageError
from stoker.world import World

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

STATE = {"w": torch.arange(8.0)}


@contextmanager
def handled(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_a_signal_saves_at_the_next_step_and_asks_the_loop_to_leave(open_checkpointer, tmp_path) -> None:
    said: list[str] = []
    ck = open_checkpointer(save_on_signal=("SIGUSR1", "SIGTERM"), say=said.append)
    assert not ck.step(1, state=STATE)
    signal.raise_signal(signal.SIGUSR1)
    assert not ck.should_leave
    assert ck.step(2, state=STATE)
    assert ck.should_leave
    assert not ck.is_saving
    found = ck.latest()
    assert (found.step, found.manifest.marks.reason) == (2, "SIGUSR1")
    assert said == [f"SIGUSR1: step 2 is saved as {found.name}, the loop may leave"]
    assert not ck.step(3, state=STATE), "saved once, not at every step from then on"


def test_signals_go_back_to_whose_they_were(open_checkpointer) -> None:
    heard: list[int] = []
    with handled(signal.SIGUSR1, lambda number, _: heard.append(number)):
        mine = signal.getsignal(signal.SIGUSR1)
        ck = open_checkpointer(save_on_signal=("SIGUSR1",))
        signal.raise_signal(signal.SIGUSR1)
        assert heard == [signal.SIGUSR1], "the handler that was there is called too"
        ck.close()
        assert signal.getsignal(signal.SIGUSR1) is mine


def test_a_handler_that_was_set_later_stays(open_checkpointer) -> None:
    def later(*_: object) -> None: ...

    with handled(signal.SIGUSR1, signal.SIG_DFL):
        ck = open_checkpointer(save_on_signal=("SIGUSR1",))
        signal.signal(signal.SIGUSR1, later)
        ck.close()
        assert signal.getsignal(signal.SIGUSR1) is later


def test_the_second_interrupt_interrupts(open_checkpointer) -> None:
    ck = open_checkpointer(save_on_signal=("SIGINT",))
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert ck.step(1, state=STATE)


def test_a_forked_child_dies_of_the_signal_as_if_nobody_had_caught_it(open_checkpointer) -> None:
    open_checkpointer(save_on_signal=("SIGTERM",))
    fork = multiprocessing.get_context("fork")
    runs = fork.Event()  # a signal in the middle of a fork is lost in any Python
    child = fork.Process(target=lambda: (runs.set(), time.sleep(60)))
    child.start()
    assert runs.wait(30)
    child.terminate()
    child.join(30)
    assert child.exitcode == -signal.SIGTERM


def test_outside_of_the_main_thread_signals_are_refused(open_checkpointer, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(open_checkpointer, save_on_signal=("SIGTERM",))
        with pytest.raises(UsageError, match="main thread"):
            made.result(20)


@pytest.mark.parametrize("signals", [("SIGKILL",), ("TERM",), ("SIG_DFL",), "SIGTERM"])
def test_what_cannot_be_caught_is_refused(open_checkpointer, signals) -> None:
    with pytest.raises(UsageError, match="save_on_signal"):
        open_checkpointer(save_on_signal=signals)


def test_a_final_save_is_durable_and_marked(open_checkpointer, tmp_path: Path) -> None:
    ck = open_checkpointer(when_busy="skip")
    ck.save(7, state=STATE)
    assert ck.save(8, final=True, state=STATE)
    assert not ck.is_saving
    (folder,) = (tmp_path / "run").glob("*-step-000000008-*")
    manifest = parse_manifest((folder / "checkpoint.json").read_bytes(), name=folder.name)
    assert manifest.marks.reason == "final"


# --- several ranks ------------------------------------------------------------------------------------


def paced() -> Iterator[int]:
    """Steps that take a millisecond."""
    for step in count(1):
        time.sleep(0.001)
        yield step


class Ranks:
    """Threads that take steps as ranks do, each at its own speed, until they leave."""

    def __init__(self, folder: Path, size: int) -> None:
        self.worlds = [World(rank=rank, size=size, local_rank=rank, local_size=size) for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            boards = list(pool.map(lambda one: TcpBoard(folder, one, timeout_s=30), self.worlds))
        self.boards, self.notices = boards, [Notice(()) for _ in boards]
        for notice in self.notices:
            notice.listens = True
        self.left: dict[int, int] = {}

    def warn(self, rank: int) -> None:
        self.notices[rank].came_at, self.notices[rank].name = time.monotonic(), "SIGTERM"

    def leaving(self, rank: int, *, grace_s: float = 60.0) -> Leaving:
        return Leaving(self.boards[rank], self.worlds[rank], self.notices[rank], grace_s=grace_s)

    def run(self, rank: int, *, steps: int, pause: random.Random, warn_at: int = 0) -> None:
        leaving = self.leaving(rank)
        for step in range(1, steps + 1):
            time.sleep(pause.random() / 500)
            if step == warn_at:
                self.warn(rank)
            if leaving.after(step):
                self.left[rank] = step
                break
        leaving.close()

    def close(self) -> None:
        threads = [threading.Thread(target=board.close) for board in self.boards]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with ExitStack() as stack:
        found = Ranks(tmp_path, 3)
        stack.callback(found.close)
        yield found


@pytest.mark.parametrize("warned", [{1: 40}, {0: 30, 1: 200, 2: 90}, {0: 100, 1: 100, 2: 100}])
def test_all_ranks_leave_after_the_same_step_however_far_apart_they_are(ranks: Ranks, warned) -> None:
    """Nothing holds them together here: no collective, only what they agree on."""
    jobs = [
        threading.Thread(
            target=ranks.run,
            args=(rank,),
            kwargs={"steps": 10_000, "pause": random.Random(rank), "warn_at": warned.get(rank, 0)},
        )
        for rank in range(3)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert len(set(ranks.left.values())) == 1
    assert set(ranks.left) == {0, 1, 2}


def test_a_rank_that_has_ended_keeps_nobody_waiting(ranks: Ranks) -> None:
    for rank in (1, 2):
        ranks.run(rank, steps=3, pause=random.Random(0))
    leaving = ranks.leaving(0)
    assert leaving.after(2) is None
    ranks.warn(0)
    assert leaving.after(3) is None, "the others have passed it"
    leaving.close()


def test_a_dead_rank_is_named_and_the_others_leave_unsaved_in_time(ranks: Ranks) -> None:
    first, second = ranks.leaving(0, grace_s=1.0), ranks.leaving(1, grace_s=1.0)
    ranks.warn(1)
    for one in (first, second):
        goodbye = next(filter(None, map(one.after, paced())))
        assert (goodbye.agreed, goodbye.silent) == (False, (2,))
        one.close()


def test_nothing_is_left_of_it(open_checkpointer) -> None:
    ck = open_checkpointer(save_on_signal=("SIGUSR1",))
    ck.step(1, state=STATE)
    ck.close()
    ck.close()
    assert "stoker-leave" not in [thread.name for thread in threading.enumerate()]
