"""Consensus among ranks: what they decide together at a save and at a restore, in one short exchange each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.notes import (
    Dealt,
    Standing,
    claims_from,
    claims_note,
    dealt_from,
    dealt_note,
    digest_of,
)
from stoker.checkpoint.saved.layout import path_name
from stoker.checkpoint.snapshot.claims import SLAB_BYTES, Claim, deal, is_shared_by_all, told_apart
from stoker.checkpoint.snapshot.digest import digests
from stoker.checkpoint.snapshot.plan import Plan, claims_of, loose_paths, make_plan, steady_paths
from stoker.checkpoint.snapshot.state import DTensor, Flat, Objects
from stoker.checkpoint.snapshot.witness import spots
from stoker.errors import BadCheckpointError, CheckpointError, StokerError
from stoker.world import World

_POLL_S = 0.0002


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether to save now, and whether the plan must be made anew."""

    go: bool
    replan: bool


class Rounds:
    """This rank's side of the exchanges. All ranks call the same methods in the same order."""

    slab_bytes = SLAB_BYTES

    def __init__(self, board: Board, world: World, *, timeout_s: float) -> None:
        self.board, self.world, self.timeout_s = board, world, timeout_s
        self.number = -1  # of the save
        self.fresh = True  # no plan was made together yet
        self._others = 0

    def meet(self, mine: Standing, *, changed: bool, busy: bool, loose: str = "") -> Verdict:
        """Begin a save: rank 0 says whether, once all have come. It skips if it is busy itself; the plan is
        made anew if the state of any rank has changed its shape, or what ranks held alike no longer is
        (`loose` is a digest of it). Ranks that do not mean the same save are refused, on every rank."""
        self.number, self.fresh = self.number + 1, False
        number, board = self.number, self.board
        if self.world.size == 1:
            return Verdict(go=not busy, replan=changed)
        self._bring(f"standing/{number}", mine)
        board.count(f"changed/{number}", int(changed))
        if loose:
            board.count(f"loose/{number}/{loose}", 1)
            board.count(f"loose/{number}", 1)
        board.count(f"ready/{number}", 1)
        if self.world.rank == 0:
            self._wait_for_all(f"ready/{number}")
            board.post(f"verdict/{number}", self._verdict(mine, busy=busy, loose=loose))
        note = checked(board.read(f"verdict/{number}", timeout_s=self.timeout_s))
        return Verdict(**json.loads(note))

    def _verdict(self, mine: Standing, *, busy: bool, loose: str) -> bytes:
        number = self.number
        try:
            self._check_standings(f"standing/{number}", mine)
        except StokerError as error:
            return error_note(error)
        changed = self.board.count(f"changed/{number}", 0) > 0
        alike = loose and self.board.count(f"loose/{number}/{loose}", 0)
        drifted = self.board.count(f"loose/{number}", 0) != (alike or 0)
        spent = (f"standing/{number}/{mine.digest}", f"loose/{number}", f"loose/{number}/{loose}")
        self.board.forget(spent)  # their names are not known to who clears up after the save
        return b"+" + json.dumps({"go": not busy, "replan": changed or drifted}).encode()

    def agree(self, mine: Standing) -> None:
        """All ranks mean the same, or all are refused, and told which two differ and in what."""
        if self.world.size == 1:
            return
        self._others += 1
        key = f"agree/{self._others}"
        self._bring(key, mine)
        self.board.count(f"{key}/ready", 1)

        def compared() -> str:
            self._wait_for_all(f"{key}/ready")
            self._check_standings(key, mine)
            return ""

        self.told(compared)

    def _bring(self, key: str, mine: Standing) -> None:
        self.board.post(f"{key}/{self.world.rank}", mine.to_json())
        self.board.count(f"{key}/{mine.digest}", 1)

    def _check_standings(self, key: str, mine: Standing) -> None:
        """One question if all are alike; who differs is looked for only if somebody does."""
        if self.board.count(f"{key}/{mine.digest}", 0) == self.world.size:
            return
        for rank in range(1, self.world.size):
            mine.check(
                Standing(**json.loads(self.board.read(f"{key}/{rank}", timeout_s=self.timeout_s))), rank
            )

    def pool(self, note: bytes, combine: Callable[[list[bytes]], bytes]) -> bytes:
        """What rank 0 makes of a note from every rank, on every rank."""
        if self.world.size == 1:
            return combine([note])
        self._others += 1
        key = f"pool/{self._others}"
        self.board.post(f"{key}/{self.world.rank}", note)

        def combined() -> str:
            ranks = range(self.world.size)
            notes = [self.board.read(f"{key}/{rank}", timeout_s=self.timeout_s) for rank in ranks]
            return combine(notes).decode()

        return self.told(combined).encode()

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
            key = f"well/{self._others}/{rank}"
            note = self.board.read(key, timeout_s=self.timeout_s, of=rank, moving="read")
            said = said or (note[1:].decode() if note[:1] == b"?" else checked(note).decode())
        return said

    def _tell(self, error: StokerError | None) -> None:
        self._others += 1
        damage = b"?" + error.message.encode() if isinstance(error, BadCheckpointError) else b"+"
        note = damage if error is None or isinstance(error, BadCheckpointError) else error_note(error)
        self.board.post(f"well/{self._others}/{self.world.rank}", note)

    def deal(self, claims: Sequence[Claim], *, trust: bool) -> Dealt:
        """What this rank is to write of what it claims to hold, and which claims others make too. Where one
        rank cannot say what it holds all fail, and know which it was."""
        if self.world.size == 1:
            return Dealt(deals=deal([claims])[0], alike=[], apart=[])
        self.board.post(self._key("boxes"), b"+" + claims_note(claims))
        if self.world.rank == 0:
            self._deal_out(trust=trust)
        note = checked(self.board.read(self._key("dealt"), timeout_s=self.timeout_s))
        return dealt_from(note, claims)

    def refuse(self, error: BaseException) -> None:
        """Tell the others, who wait for it in `deal`, that this rank cannot say what it holds."""
        note = error_note(error, what=f"the state of rank {self.world.rank} cannot be saved")
        self.board.post(self._key("boxes"), note)
        if self.world.rank == 0:
            self._hand_out([note] * self.world.size)

    def _deal_out(self, *, trust: bool) -> None:
        try:
            read = cache(claims_from)  # replicas say the same, to the byte
            held = [read(self._held_by(rank)) for rank in range(self.world.size)]
            dealt = deal(held, trust=trust, slab_bytes=self.slab_bytes)
            by_all = is_shared_by_all(held)
            notes = [
                b"+" + dealt_note(Dealt(deals=deals, alike=alike, apart=apart, by_all=by_all), claims)
                for deals, (alike, apart), claims in zip(dealt, told_apart(held, dealt), held, strict=True)
            ]
        except BaseException as error:
            self._hand_out([error_note(error)] * self.world.size)
            raise
        self._hand_out(notes)

    def _held_by(self, rank: int) -> bytes:
        return checked(self.board.read(self._key("boxes", rank), timeout_s=self.timeout_s))

    def _hand_out(self, notes: list[bytes]) -> None:
        for rank, note in enumerate(notes):
            self.board.post(self._key("dealt", rank), note)

    def _key(self, kind: str, rank: int | None = None) -> str:
        return f"{kind}/{self.number}/{self.world.rank if rank is None else rank}"

    def _wait_for_all(self, key: str) -> None:
        deadline = time.monotonic() + self.timeout_s
        while (come := self.board.count(key, 0)) < self.world.size:
            self.board.check_alive()
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"{come} of {self.world.size} ranks came to a save within {self.timeout_s:.0f} s",
                    hint="every rank must call step() with the same steps; a rank may have died",
                )
            time.sleep(_POLL_S)


def agreed_plan(
    rounds: Rounds, objects: Objects, flat: Flat, *, check: bool = True, trust: bool = False
) -> Plan:
    """This rank's share of the state, after all have said what they hold; with `check`, and shown that what
    they hold alike is alike."""
    try:
        flat.check()
        claims = claims_of(flat, objects, ranks=rounds.world.size, check=check)
    except BaseException as error:
        rounds.refuse(error)
        raise
    dealt = rounds.deal(claims, trust=trust)
    alike = {claims[at].box.path for at in dealt.alike}
    watched = alike & loose_paths(objects, flat) if alike else set()
    plain = (path for path in alike - watched if not isinstance(flat.tensors[path], DTensor))
    return make_plan(
        flat,
        claims,
        dealt.deals,
        steady_paths(objects, flat),
        loose=[path for path in flat.tensors if path in watched],
        alike=sorted(plain, key=path_name) if dealt.by_all else (),
        apart=[claims[at].box.name for at in dealt.apart if _should_agree(claims[at], objects)],
        checked=check,
        compared={
            claims[at].box.path: claims[at].digest
            for at in dealt.alike
            if check and len(claims[at].mesh) < rounds.world.size
        },
    )


def _should_agree(claim: Claim, objects: Objects) -> bool:
    """Parameters and what an optimizer keeps for them are mostly meant to be alike; generators are not."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return not claim.free and isinstance(objects.get(claim.box.path[0]), kinds)


def loose_digest(flat: Flat, plan: Plan | None, *, turn: int, waits: bool) -> str:
    """Of what may cease to be alike from one save to the next: all that is likely to, and of the rest, which
    only replicas that lost touch (or that train apart on purpose) do not hold alike, a few pieces, others at
    each turn. Not of what lies on a card where the loop does not wait for cards (`waits`). Nothing where
    there is no such thing."""
    if plan is None or not (plan.loose or plan.alike):
        return ""
    loose = [flat.tensors[path] for path in plan.loose if path in flat.tensors]
    alike = [flat.tensors.get(path) for path in plan.alike]
    some = spots([one for one in alike if one is not None], turn=turn)
    return digest_of(str(digests([*loose, *(one for one in some if waits or not one.is_cuda)])))
