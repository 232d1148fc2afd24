"""What the ranks decide together at a save and at a restore, in one short exchange each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass

from stoker.checkpoint.board import Board, checked, error_note
from stoker.errors import BadCheckpointError, CheckpointError, StokerError
from stoker.saved.layout import Box, Part, Piece, part_from_json
from stoker.snapshot.plan import Plan, held_boxes, make_plan, share, steady_paths
from stoker.snapshot.state import Flat, Objects
from stoker.world import World

_POLL_S = 0.0002


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether to save now, and whether the plan must be made anew."""

    go: bool
    replan: bool


class Rounds:
    """This rank's side of the exchanges. All ranks call the same methods in the same order."""

    def __init__(self, board: Board, world: World, *, timeout_s: float) -> None:
        self.board, self.world, self.timeout_s = board, world, timeout_s
        self.number = -1  # of the save
        self.fresh = True  # no plan was made together yet
        self._others = 0

    def meet(self, *, changed: bool, busy: bool) -> Verdict:
        """Begin a save: rank 0 says whether, once all have come. It skips if it is busy itself; the plan is
        made anew if the state of any rank has changed its shape."""
        self.number, self.fresh = self.number + 1, False
        number, board = self.number, self.board
        if self.world.size == 1:
            return Verdict(go=not busy, replan=changed)
        board.count(f"changed/{number}", int(changed))
        board.count(f"ready/{number}", 1)
        if self.world.rank == 0:
            self._wait_for_all(f"ready/{number}")
            plain = {"go": not busy, "replan": board.count(f"changed/{number}", 0) > 0}
            board.post(f"verdict/{number}", json.dumps(plain).encode())
            return Verdict(**plain)
        return Verdict(**json.loads(board.read(f"verdict/{number}", timeout_s=self.timeout_s)))

    def told(self, say: Callable[[], str]) -> str:
        """What rank 0 says, on every rank; where it cannot say anything all fail with it."""
        if self.world.size == 1:
            return say()
        self._others += 1
        key = f"told/{self._others}"
        if self.world.rank == 0:
            try:
                self.board.post(key, b"+" + say().encode())
            except StokerError as error:
                self.board.post(key, error_note(error))
                raise
        return checked(self.board.read(key, timeout_s=self.timeout_s)).decode()

    def all_well(self, error: StokerError | None) -> str:
        """What went wrong with a checkpoint on any rank, in words; nothing if all is well. What is wrong
        with more than the checkpoint is raised, on every rank."""
        if error is not None and not isinstance(error, BadCheckpointError):
            self._tell(error)
            raise error
        self._tell(error)
        if self.world.size == 1:
            return error.message if error else ""
        said = ""
        for rank in range(self.world.size):
            note = self.board.read(f"well/{self._others}/{rank}", timeout_s=self.timeout_s)
            said = said or (note[1:].decode() if note[:1] == b"?" else checked(note).decode())
        return said

    def _tell(self, error: StokerError | None) -> None:
        self._others += 1
        damage = b"?" + error.message.encode() if isinstance(error, BadCheckpointError) else b"+"
        note = damage if error is None or isinstance(error, BadCheckpointError) else error_note(error)
        self.board.post(f"well/{self._others}/{self.world.rank}", note)

    def deal(self, held: list[Box]) -> list[Box]:
        """Which of the boxes that this rank holds it is to write. Where one rank cannot say what it holds
        all fail, and know which it was."""
        if self.world.size == 1:
            return held
        self.board.post(self._key("boxes"), b"+" + _boxes_note(held))
        if self.world.rank == 0:
            self._deal_out()
        return _boxes(checked(self.board.read(self._key("dealt"), timeout_s=self.timeout_s)))

    def refuse(self, error: BaseException) -> None:
        """Tell the others, who wait for it in `deal`, that this rank cannot say what it holds."""
        note = error_note(error, what=f"the state of rank {self.world.rank} cannot be saved")
        self.board.post(self._key("boxes"), note)
        if self.world.rank == 0:
            self._hand_out([note] * self.world.size)

    def _deal_out(self) -> None:
        try:
            held = [self._held_by(rank) for rank in range(self.world.size)]
            notes = [b"+" + _boxes_note(mine) for mine in share(held)]
        except BaseException as error:
            self._hand_out([error_note(error)] * self.world.size)
            raise
        self._hand_out(notes)

    def _held_by(self, rank: int) -> list[Box]:
        return _boxes(checked(self.board.read(self._key("boxes", rank), timeout_s=self.timeout_s)))

    def _hand_out(self, notes: list[bytes]) -> None:
        for rank, note in enumerate(notes):
            self.board.post(self._key("dealt", rank), note)

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"{kind}/{self.number}/{self.world.rank if rank is None else rank}"

    def _wait_for_all(self, key: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while (come := self.board.count(key, 0)) < self.world.size:
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{come} of {self.world.size} ranks came to a save within {self.timeout_s:.0f} s",
                    hint="every rank must call step() with the same steps; a rank may have died",
                )
            time.sleep(_POLL_S)


def agreed_plan(rounds: Rounds, objects: Objects, flat: Flat) -> Plan:
    """This rank's share of the state, after all have said what they hold."""
    try:
        flat.check()
        held, shared = held_boxes(flat)
    except BaseException as error:
        rounds.refuse(error)
        raise
    return make_plan(flat, rounds.deal(held), shared, steady_paths(objects, flat))


def _boxes_note(boxes: list[Box]) -> bytes:
    pieces = tuple(Piece(box=box, at=0) for box in boxes)
    return Part(rank=0, save="", bytes=0, pieces=pieces, chunks=()).to_json()


def _boxes(note: bytes) -> list[Box]:
    return [piece.box for piece in part_from_json(note).pieces]
