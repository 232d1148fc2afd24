"""Read back what was saved, before anything older is deleted for it."""

from __future__ import annotations

from pathlib import Path

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.saved.commit import wait_for_commit
from stoker.checkpoint.saved.layout import Part
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.tiers import LocalFolder
from stoker.checkpoint.saved.writer import Pace
from stoker.errors import BadCheckpointError, StokerError
from stoker.world import World


def prove(
    root: Path,
    name: str,
    number: int,
    board: Board,
    world: World,
    *,
    written: tuple[Part, bytes],
    timeout_s: float,
) -> None:
    """Read back a checkpoint, every rank its own part (`written`, with its description), past the page cache.
    Returns when all of it is what was saved; raises the same on every rank when it is not."""
    key = f"proof/{number}"
    try:
        _read_back(root, name, board, world, written=written, timeout_s=timeout_s)
        board.post(f"{key}/{world.rank}", b"+")
    except Exception as error:
        board.post(f"{key}/{world.rank}", error_note(error))
    if world.rank == 0:
        board.post(f"{key}/all", _of_all(key, board, world, timeout_s=timeout_s))
    checked(board.read(f"{key}/all", timeout_s=2 * timeout_s, of=0, moving="write"))


def _read_back(
    root: Path, name: str, board: Board, world: World, *, written: tuple[Part, bytes], timeout_s: float
) -> None:
    wait_for_commit(root, name, timeout_s=timeout_s)
    checkpoint = Checkpoint(LocalFolder(root / name), written={world.rank: written})
    checkpoint.pace = Pace(moved=lambda: board.moved("write"))
    if faults := checkpoint.verify([world.rank]):
        raise BadCheckpointError(
            f"{name} does not come back as it was saved: {faults[0]}",
            hint="check this disk; nothing older was deleted",
        )


def _of_all(key: str, board: Board, world: World, *, timeout_s: float) -> bytes:
    try:
        for rank in range(world.size):
            checked(board.read(f"{key}/{rank}", timeout_s=timeout_s, of=rank, moving="write"))
    except StokerError as error:
        return error_note(error)
    return b"+"
