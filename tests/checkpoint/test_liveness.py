"""Who lives: a death is known at once, a goodbye is none, and slowness is no death."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from stoker.checkpoint.board import TcpBoard, error_note
from stoker.checkpoint.liveness import Line, Watch
from stoker.checkpoint.turns import Turns
from stoker.errors import CheckpointError
from stoker.world import World

FIRST = World(rank=0, size=2, local_size=2)
SECOND = replace(FIRST, rank=1, local_rank=1)


class Seen:
    """What a watch has told."""

    def __init__(self) -> None:
        self.gone: dict[int, bool] = {}
        self.came = threading.Event()

    def note(self, rank: int, who: str, said: bool) -> None:
        self.gone[rank] = said
        self.came.set()


HOLDS = """
import os, signal, sys
from stoker.checkpoint.liveness import Line
line = Line(f"127.0.0.1:{sys.argv[1]}", rank=3)
child = os.fork() if sys.argv[2] else 1  # as a worker of a loader, that outlives its parent for a while
if child:
    print(child, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("with_child", ["", "yes"])
def test_a_killed_process_is_known_at_once_also_while_a_child_of_it_lives(
    with_child: str, stoker_environ: Any
) -> None:
    seen = Seen()
    watch = Watch("127.0.0.1", gone=seen.note)
    command = [sys.executable, "-c", HOLDS, str(watch.port), with_child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=stoker_environ(), text=True) as process:
        child = int(process.stdout.readline())
        process.kill()
        try:
            assert seen.came.wait(20)
            assert seen.gone == {3: False}
        finally:
            if with_child:
                os.kill(child, signal.SIGKILL)
            watch.close()


def test_who_says_goodbye_has_not_died() -> None:
    seen = Seen()
    watch = Watch("127.0.0.1", gone=seen.note)
    Line(f"127.0.0.1:{watch.port}", rank=1).close()
    assert seen.came.wait(20)
    watch.close()
    assert seen.gone == {1: True}


@pytest.fixture
def boards(tmp_path: Path) -> Any:
    first = TcpBoard(tmp_path, FIRST)
    second = TcpBoard(tmp_path, SECOND, timeout_s=20)
    yield first, second
    second.close()
    first.close()


def test_who_waits_for_a_dead_rank_hears_so_and_what_it_left_still_counts(boards: Any) -> None:
    first, second = boards
    second.post("left/behind", b"a note")
    second._line._socket.close()  # as the kernel does
    for board in boards:
        for of in (1, None):
            with pytest.raises(CheckpointError, match=r"rank 1 \(process \d+ on .*\) has died"):
                board.read("never", timeout_s=60, of=of)
    assert first.read("left/behind", timeout_s=60, of=1) == b"a note"


def test_waiting_goes_on_while_anything_moves_and_ends_when_nothing_does(boards: Any) -> None:
    first, second = boards
    moves, came = threading.Event(), []

    def wait() -> None:
        try:
            first.read("late", timeout_s=0.5, moving="write")
        except CheckpointError as error:
            came.append(error.message)

    waits = threading.Thread(target=wait)
    waits.start()
    for _ in range(10):  # for four times as long as it waits for somebody who does nothing
        second.count("moved/write", 1)
        moves.wait(0.2)
    assert came == []
    waits.join()
    assert "in vain for 'late'" in came[0]


def test_waiting_for_a_turn_is_no_death(boards: Any) -> None:
    first, second = boards
    options = {"what": "write", "timeout_s": 0.5, "bytes_per_s": 0.0}
    mine = Turns(first, rank=0, after=[], **options)
    other = Turns(second, rank=1, after=[0], **options)
    got = []

    def wait() -> None:
        with other.turn(7):
            got.append(time.monotonic())

    waits = threading.Thread(target=wait)
    with mine.turn(7):
        waits.start()
        for _ in range(8):
            first.count("moved/write", 1)
            time.sleep(0.2)
        done = time.monotonic()
    waits.join()
    assert got[0] > done


def test_long_notes_arrive_whole_and_are_forgotten_whole(boards: Any) -> None:
    first, second = boards
    note = os.urandom(9 << 20)
    first.post("long", note)
    assert second.read("long", timeout_s=20) == note
    first.forget(["long"])
    assert second.look("long") is None
    assert not first._store.check(["long#1"])


def test_damage_stays_damage_on_the_board(boards: Any) -> None:
    from stoker.checkpoint.board import checked
    from stoker.errors import BadCheckpointError

    boards[0].post("bad", error_note(BadCheckpointError("torn", hint="none")))
    with pytest.raises(BadCheckpointError, match="torn"):
        checked(boards[1].read("bad", timeout_s=20))
