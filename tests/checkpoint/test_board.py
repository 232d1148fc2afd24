"""The board that the ranks of a job meet on: found through a file in the folder, never that of another."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker.checkpoint.board import ADDRESS, TcpBoard
from stoker.errors import CheckpointError
from stoker.world import World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FIRST = World(rank=0, size=2, local_size=2, launcher="torchrun", run="MASTER_PORT=1 MASTER_ADDR=localhost")
SECOND = replace(FIRST, rank=1, local_rank=1)


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Callable[..., TcpBoard]]:
    """`join(world)` the board in the folder; all are left at the end, that of rank 0 last."""
    with ExitStack() as stack:

        def make(world: World, timeout_s: float = 20) -> TcpBoard:
            board = TcpBoard(tmp_path, world, timeout_s=timeout_s)
            stack.callback(board.close)
            return board

        yield make


def test_the_ranks_of_a_job_meet(join) -> None:
    first = join(FIRST)
    second = join(replace(SECOND, run="MASTER_PORT=1 MASTER_ADDR=node0 TORCHELASTIC_RESTART_COUNT=1"))
    first.post("a", b"note")
    assert second.read("a", timeout_s=20) == b"note"


@pytest.mark.parametrize(
    "other",
    [replace(SECOND, size=3, local_size=3), replace(SECOND, run="MASTER_PORT=2 MASTER_ADDR=localhost")],
    ids=["of another size", "of another launch"],
)
def test_the_board_of_another_job_is_not_joined(other: World, join) -> None:
    join(FIRST)
    with pytest.raises(CheckpointError, match=r"only that of another job \(2 ranks MASTER_PORT=1; this one"):
        join(other, timeout_s=0.2)
    join(SECOND)  # its place was not taken


@pytest.mark.parametrize(
    ("more", "host"),
    [
        ({}, "127.0.0.1"),
        ({"nodes": 2}, "localhost"),
        ({"guesses_nodes": True}, "127.0.0.1"),  # they meet on this machine
        ({"guesses_nodes": True, "run": "MASTER_ADDR=node0"}, "localhost"),
    ],
)
def test_a_board_is_served_where_ranks_of_other_machines_could_come(
    more, host: str, join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "localhost")
    join(replace(FIRST, size=1, local_size=1, **more))  # the only rank: at the end nobody is waited for
    assert json.loads((tmp_path / ADDRESS).read_bytes())["host"] == host


def test_a_board_that_does_not_say_whose_it_is_is_not_joined(join, tmp_path: Path) -> None:
    join(FIRST)
    found = json.loads((tmp_path / ADDRESS).read_bytes())
    (tmp_path / ADDRESS).write_text(json.dumps({key: found[key] for key in ("host", "port", "token")}))
    with pytest.raises(CheckpointError, match=r"only that of another job \(unknown"):
        join(SECOND, timeout_s=0.2)
    (tmp_path / ADDRESS).write_text(json.dumps(found))
    join(SECOND)
