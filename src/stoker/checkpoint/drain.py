"""Drain: background upload of committed checkpoints to the remote tier.

What is owed lies on the disk: the newest checkpoint here, until the store has its manifest, and then those
that keep rules spare. Rank 0 says which is next, every rank uploads its own part, verified as it is read, and
rank 0 uploads the manifest once all parts are there. What fails is tried again while the job runs, and
taken up by the next one.

    rank 0    drain/N: its name            ranks    bring their parts, say so: drained/N/R
    rank 0    brings the manifest, says how it ended: drained/N/all; deletes older ones there
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.commit import wait_for_commit
from stoker.checkpoint.saved.keep import spared_here
from stoker.checkpoint.saved.layout import part_name
from stoker.checkpoint.saved.retention import Ours, has_local, remote_garbage, remove_remote, retain_remote
from stoker.checkpoint.saved.tiers import Tiers, local_names, remote_names
from stoker.checkpoint.saved.upload import Upload
from stoker.checkpoint.storm import waits_for
from stoker.checkpoint.turns import Turns
from stoker.errors import BadCheckpointError, CheckpointError, StokerError

_POLL_S = 0.05
_LONGEST_YIELD_S = 60.0
_BACKOFF_S, _LONGEST_BACKOFF_S = 0.1, 30.0
OWED = "it stays owed: it is tried again by itself, by the next run too, or by `stoker checkpoint push`"


class Drain:
    """Brings committed checkpoints to the remote tier. Its thread must not outlive the interpreter (a
    client in native code aborts the process then): whoever makes a drain closes it, at exit too."""

    def __init__(
        self, tiers: Tiers, board: Board, options: CheckpointOptions, *, ours: Ours, busy: Callable[[], bool]
    ) -> None:
        assert tiers.remote is not None
        self._tiers, self._store, self._board, self._options = tiers, tiers.remote, board, options
        self._ours, self._busy = ours, busy
        self._world, self._outage = options.world, _Outage(options.timeout_s)
        self._turns = Turns(
            board,
            rank=self._world.rank,
            after=waits_for(self._world, options.limits),
            what="drain",
            timeout_s=options.timeout_s,
            bytes_per_s=options.limits.drain_bytes_per_s,
        )
        self._changed = threading.Condition()
        self._wanted, self._holding, self._closing = "", "", False
        self._begun: set[str] = set()
        self._proven: set[str] = set()
        self._failures: list[tuple[str, StokerError]] = []
        self.drained: list[str] = []
        self._thread = threading.Thread(target=self._run, name="stoker-drain", daemon=True)
        self._thread.start()

    def committed(self, name: str) -> None:
        with self._changed:
            if name not in self.drained:  # else rank 0 was faster, and all is done already
                self._wanted = name
            self._changed.notify_all()

    @property
    def holding(self) -> str:
        """What is being read here, and must not be deleted."""
        return self._holding

    @property
    def owed(self) -> str:
        """The newest checkpoint that the remote tier has not."""
        return self._wanted

    def take_failures(self) -> list[tuple[str, StokerError]]:
        """What the loop should hear of: (what was not "drained", "tidied" or "good", why)."""
        with self._changed:
            failures, self._failures = self._failures, []
            return failures

    def close(self) -> None:
        """Drain what was committed last, then end; where that fails it stays owed."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._lead() if self._world.rank == 0 else self._follow()
        except StokerError as error:  # the board is gone, and with it the job
            if self._wanted:
                self._tell("drained", error)

    def _tell(self, what: str, error: StokerError) -> None:
        with self._changed:
            if all(error.message != known.message for _, known in self._failures):
                self._failures.append((what, error))

    # --- rank 0 ---

    def _lead(self) -> None:
        number, inherited = 0, self._take_up()
        while name := self._next():
            if name == inherited and self._is_there(name):
                self._conclude(name)
                continue
            self._board.post(f"drain/{number}", name.encode())
            error = self._attempt(number, name)
            over = self._closing
            note = _Outcome.of(error, tell=self._outage.tells(error))
            self._board.post(f"drained/{number}/all", note.to_bytes())
            self._heed(name, note)
            self._forget(number - 1)
            number += 1
            if error is None:
                self._tidy(name)
            elif over:
                break
        self._board.post(f"drain/{number}", b"")

    def _take_up(self) -> str:
        """What a run before still owes, as far as can be seen from here."""
        with suppress(StokerError):
            names = [name for name in local_names(self._tiers.root)[:1] if has_local(self._tiers.root, name)]
            with self._changed:
                self._wanted = self._wanted or "".join(names)
            return "".join(names)
        return ""

    def _is_there(self, name: str) -> bool:
        with suppress(StokerError):
            return name in remote_names(self._store)
        return False

    def _next(self) -> str:
        """What to drain now; nothing when it is time to end."""
        with self._changed:
            while not self._closing:
                if self._wanted and self._outage.rest_s <= 0:
                    break
                self._changed.wait(self._outage.rest_s if self._wanted else None)
            return self._wanted

    def _attempt(self, number: int, name: str) -> StokerError | None:
        """One try of all ranks; what went wrong, if something did."""
        faults = [self._bring(number, name), *self._others(number)]
        first = next(filter(None, faults), None)
        if first is None:
            try:
                self._upload(name).finish()
            except Exception as error:
                return _named(error)
        return first

    def _others(self, number: int) -> list[StokerError | None]:
        """What went wrong with each: all are waited for, or they would miss the next try."""
        faults: list[StokerError | None] = []
        timeout_s = self._options.timeout_s
        for rank in range(1, self._world.size):
            try:
                key = f"drained/{number}/{rank}"
                checked(self._board.read(key, timeout_s=timeout_s, of=rank, moving="drain"))
                faults.append(None)
            except StokerError as error:
                faults.append(error)
        return faults

    def _tidy(self, name: str) -> None:
        """Delete in the remote tier what this one stands in for; at first also what killed runs left."""
        keep, first = self._options.keep, len(self.drained) == 1
        if keep:
            self._proven.add(name)
        try:
            for one in remote_garbage(self._store) if first else ():
                remove_remote(self._store, one.name)
            retain_remote(
                self._store,
                root=self._tiers.root,
                keep=keep,
                proven=self._proven.__contains__,
                among=self._ours.has,
                rules=self._options.rules,
            )
            self._want_what_rules_keep()
        except StokerError as error:
            self._tell("tidied", error)

    def _want_what_rules_keep(self) -> None:
        """With the newest there, the best, the hourly and the pinned are owed: an outage may have passed over
        them. One at a time, and none at the end: the others leave once their last save is there."""
        root = self._tiers.root
        here = [name for name in filter(self._ours.has, local_names(root)) if name not in self.drained]
        kept = [name for name in spared_here(root, here, self._options.rules) if has_local(root, name)]
        there = set(remote_names(self._store)) if kept else set()
        with self._changed:
            if not self._wanted and not self._closing:
                self._wanted = next((name for name in here if name in kept and name not in there), "")

    def _forget(self, number: int) -> None:
        """Notes that all ranks have read."""
        ranks = (f"drained/{number}/{rank}" for rank in range(self._world.size))
        turns = self._turns.notes(number, self._world.size)
        self._board.forget([f"drain/{number}", f"drained/{number}/all", *ranks, *turns])

    # --- the others ---

    def _follow(self) -> None:
        number = 0
        while name := self._told(f"drain/{number}"):
            self._bring(number, name)
            key = f"drained/{number}/all"
            note = self._board.read(key, timeout_s=2 * self._options.timeout_s, of=0, moving="drain")
            self._heed(name, _Outcome.from_bytes(note))
            number += 1

    def _told(self, key: str) -> str:
        """What rank 0 says is next; nothing when it is time to end. A rank that closes waits no longer than
        for its last save: rank 0 may hang in a collective that waits for this rank."""
        while True:
            note = self._board.look(key)
            with self._changed:
                if note is not None:
                    return note.decode()
                if self._closing and not self._wanted:
                    return ""
                self._changed.wait(_POLL_S)

    # --- all of them ---

    def _bring(self, number: int, name: str) -> StokerError | None:
        """Bring this rank's part of a checkpoint, and say how it went."""
        key = f"drained/{number}/{self._world.rank}"
        error: StokerError | None = None
        self._holding = name
        try:
            with self._turns.turn(number):
                wait_for_commit(self._tiers.root, name, timeout_s=self._options.timeout_s)
                upload = self._upload(name)
                again = name in self._begun or not self._ours.made(name)
                self._begun.add(name)
                mine = self._ranks(upload.ranks, self._tiers.root / name)
                upload.bring(mine, again=again, read_back=self._options.keep > 0)
        except Exception as bad:
            error = _named(bad)
        self._holding = ""
        self._board.post(key, b"+" if error is None else error_note(error))
        return error

    def _upload(self, name: str) -> Upload:
        return Upload(self._tiers.root / name, self._store, pace=self._turns.pace, take=self._wait_for_turn)

    def _ranks(self, parts: range, folder: Path) -> Iterable[int]:
        """Which parts are this rank's to bring: its own, and of a checkpoint that another number of ranks has
        saved those that lie here, dealt out over the ranks of this node, or over all where nobody knows."""
        world = self._world
        if len(parts) == world.size:
            return [world.rank]
        here = [part for part in parts if (folder / part_name(part, "bin")).exists()]
        if not world.knows_nodes:
            return here[world.rank :: world.size]
        return here[world.local_rank :: world.local_size]

    def _wait_for_turn(self, count: int) -> None:
        """At its pace, and after the loader; but not for ever: an old checkpoint costs too. A loop that has
        ended waits for no batch, though its loader has none ready."""
        deadline = time.monotonic() + _LONGEST_YIELD_S
        while self._busy() and not self._closing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._turns.pace.take(count)

    def _heed(self, name: str, outcome: _Outcome) -> None:
        """What all ranks make of how it ended."""
        self._outage.note(outcome.ok)
        if outcome.ok:
            self.drained.append(name)
        if outcome.ok or outcome.lasting or self._closing:
            self._conclude(name)
        last_word = self._closing and self._ours.made(name)  # of another run's the store may be unseen only
        if not outcome.ok and (outcome.tell or last_word):
            what, hint = ("good", outcome.hint) if outcome.lasting else ("drained", f"{OWED}. {outcome.hint}")
            self._tell(what, CheckpointError(outcome.message, hint=hint))

    def _conclude(self, name: str) -> None:
        with self._changed:
            if self._wanted == name:
                self._wanted = ""


def _named(error: Exception) -> StokerError:
    if isinstance(error, StokerError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}", hint="see the log of that rank")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Outcome:
    """How a drain ended, as rank 0 tells it: the same words on every rank."""

    ok: bool
    message: str = ""
    hint: str = ""
    lasting: bool = False  # another try would end alike
    tell: bool = False  # the loop should hear of it now

    @classmethod
    def of(cls, error: StokerError | None, *, tell: bool) -> _Outcome:
        if error is None:
            return cls(ok=True)
        lasting = isinstance(error, BadCheckpointError)
        return cls(ok=False, message=error.message, hint=error.hint, lasting=lasting, tell=tell or lasting)

    @classmethod
    def from_bytes(cls, note: bytes) -> _Outcome:
        return cls(**json.loads(note))

    def to_bytes(self) -> bytes:
        return json.dumps({name: getattr(self, name) for name in self.__slots__}).encode()


class _Outage:
    """How long a store has been away: when to try again, and when to say so, once for each outage."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._since, self._again_at, self._backoff_s, self._told = 0.0, 0.0, _BACKOFF_S, False

    @property
    def rest_s(self) -> float:
        """Until the next try."""
        return self._again_at - time.monotonic()

    def tells(self, error: StokerError | None) -> bool:
        away_s = time.monotonic() - self._since if self._since else 0.0
        if error is None or self._told or away_s < self._patience_s:
            return False
        self._told = True
        return True

    def note(self, ok: bool) -> None:
        now = time.monotonic()
        if ok:
            self._since, self._again_at, self._backoff_s, self._told = 0.0, 0.0, _BACKOFF_S, False
            return
        self._since = self._since or now
        self._again_at = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _LONGEST_BACKOFF_S)


class Loaders:
    """The loaders among what is saved: a drain yields while one of them is behind."""

    def __init__(self, busy: Callable[[], bool] | None) -> None:
        self._busy = busy
        self._known: tuple[Any, ...] = ()

    def note(self, objects: Iterable[Any]) -> None:
        self._known = tuple(one for one in objects if hasattr(type(one), "is_behind"))

    def behind(self) -> bool:
        return bool(self._busy and self._busy()) or any(one.is_behind for one in self._known)
