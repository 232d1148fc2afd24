"""The background half of a save: write this rank's part, commit with the others, drain.

A thread for each save, which the interpreter waits for when a script just ends; one that drains, which ends
with `close`. How a save ended is known from its future, on every rank alike: rank 0 tells the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.drain import Drain
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.storm import start_delay_s, waits_for
from stoker.errors import CheckpointError, StokerError
from stoker.saved.commit import (
    Saving,
    begin,
    commit,
    discard,
    join,
    make_manifest,
    put_part,
    sign_unsigned,
)
from stoker.saved.layout import Part, Piece, parse_manifest, part_from_json, part_name, sequence_of
from stoker.saved.retention import Ours, collect, retain
from stoker.saved.tiers import Tiers, local_names
from stoker.saved.writer import Pace, Source, write_part
from stoker.spans import span
from stoker.storage import named_errors, sync_folder


class Copy(Source, Protocol):
    """A source whose copy may fail, or be told that the save has."""

    def abort(self, error: BaseException) -> None: ...
    def finish(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One save, as the loop's thread hands it over."""

    number: int
    step: int
    asked_at: float  # monotonic
    snapshot: Copy
    pieces: tuple[Piece, ...]
    pieces_text: str
    values: tuple[tuple[Any, Any], ...]
    own: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """How a save went: its name, its bytes on this rank, and the seconds from its call to durable; and what
    the loop should be told of."""

    name: str
    step: int
    bytes: int
    durable_s: float
    warning: str


class Saver:
    """Saves in the background, one at a time."""

    def __init__(
        self, tiers: Tiers, board: Board, options: CheckpointOptions, *, busy: Callable[[], bool]
    ) -> None:
        self._tiers, self._board, self._options = tiers, board, options
        self._world = options.world
        self._thread: threading.Thread | None = None
        self.pending: Future[Finished] | None = None  # nobody has asked yet how it ended
        self._ours = Ours()
        has_remote = tiers.remote is not None
        self.drain = Drain(tiers, board, options, ours=self._ours, busy=busy) if has_remote else None
        self._sequence, self._tidies, self._forgotten = 0, False, 0
        self._collecting, self._has_collected = threading.Lock(), False
        self._newest = 0  # sequence of
        self._pace = Pace(options.limits.write_bytes_per_s)

    def collect_once(self) -> None:
        """Delete what killed runs left on this node, before anybody here needs the room."""
        with self._collecting:
            if not self._has_collected and self._world.local_rank == 0:
                with suppress(OSError):
                    collect(self._tiers.root)
            self._has_collected = True

    def note_newest(self, name: str) -> None:
        """The newest checkpoint that is known: those to come are newer."""
        self._newest = max(self._newest, sequence_of(name) or 0)

    def submit(self, save: Save) -> None:
        future: Future[Finished] = Future()
        before, self.pending = self._thread, future
        self._thread = threading.Thread(
            target=self._work, args=(save, future, before), name="stoker-checkpoint"
        )
        self._thread.start()

    def fail(self, number: int, error: BaseException) -> None:
        """Tell the others that this rank will bring no part to a save."""
        self._board.post(f"part/{number}/{self._world.rank}", error_note(error))

    def give_up(self, number: int, error: BaseException) -> None:
        """The same for a save that was never submitted: where rank 0 does not begin it nobody can."""
        self.fail(number, error)
        if self._world.rank == 0:
            for kind in ("begin", "outcome"):
                self._board.post(f"{kind}/{number}", error_note(error))

    def close(self) -> None:
        if self._thread:
            self._thread.join()
        if self.drain:
            self.drain.close()

    def _work(self, save: Save, future: Future[Finished], before: threading.Thread | None) -> None:
        if before:
            before.join()  # it is durable, but may still be deleting older ones
        try:
            done = self._run(save)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(done)
            self._retain()
        self._forget_notes(save.number - 1)

    def _run(self, save: Save) -> Finished:
        saving, leads_here = self._begin(save)
        self._ours.add(saving.name)
        mine: BaseException | None = None
        part: Part | None = None
        try:
            with span("checkpoint write", step=save.step, bytes=save.snapshot.bytes):
                part = self._write(save, saving)
            text = put_part(self._tiers.root, saving, part)
            self._board.post(f"part/{save.number}/{self._world.rank}", b"+" + text)
        except BaseException as error:
            mine = error
            save.snapshot.abort(error)
            self.fail(save.number, error)
        try:
            self._end(save, saving, part, leads_here=leads_here)
        except CheckpointError:
            if mine is not None:  # this rank knows better than what came back from rank 0
                raise mine from None
            raise
        return Finished(
            name=saving.name,
            step=save.step,
            bytes=save.snapshot.bytes,
            durable_s=time.monotonic() - save.asked_at,
            warning=self._of_strangers() if self._world.rank == 0 else "",
        )

    def _of_strangers(self) -> str:
        """What to say if another job puts checkpoints beside those of this one."""
        root = self._tiers.root
        with suppress(OSError):
            if not all(map(self._ours.has, local_names(root))):
                return (
                    f"another job saves into {root}: each keeps its own newest checkpoints, but a restart "
                    "takes the newest of all. Give each job a folder of its own"
                )
        return ""

    def _begin(self, save: Save) -> tuple[Saving, bool]:
        """The save's temporary folder, and whether this rank commits it on a node that is not rank 0's."""
        key = f"begin/{save.number}"
        try:
            if self._world.rank == 0:
                saving = begin(self._tiers.root, step=save.step, sequence=self._next_sequence(save.step))
                self._board.post(key, b"+" + saving.to_json())
                return saving, False
            note = checked(self._board.read(key, timeout_s=self._options.timeout_s))
            saving = join(self._tiers.root, note)
            return saving, self._world.local_rank == 0 and sign_unsigned(self._tiers.root, saving)
        except BaseException as error:
            save.snapshot.abort(error)
            self.give_up(save.number, error)
            raise

    def _next_sequence(self, step: int) -> int:
        if not self._sequence:
            with named_errors("write", self._tiers.root):
                self._tiers.root.mkdir(parents=True, exist_ok=True)
                sync_folder(self._tiers.root.absolute().parent)
            self._sequence = max(self._newest, self._newest_known(step))
        self._sequence += 1
        return self._sequence

    def _newest_known(self, step: int) -> int:
        """The sequence of the newest checkpoint. A remote tier that is away may hold more than lies here, but
        hardly more than there were steps."""
        try:
            names, at_least = self._tiers.names(), 0
        except StokerError:
            names, at_least = local_names(self._tiers.root), step
        return max([at_least, *(sequence_of(name) or 0 for name in names)])

    def _write(self, save: Save, saving: Saving) -> Part:
        try:
            self._wait_for_turn(save.number)
            path = saving.folder(self._tiers.root) / part_name(self._world.rank, "bin")
            chunk_bytes = self._options.chunk_bytes
            chunks = write_part(path, save.snapshot, chunk_bytes=chunk_bytes, pace=self._pace)
            save.snapshot.finish()
        finally:
            self._board.post(f"written/{save.number}/{self._world.rank}", b"")
        return Part(
            rank=self._world.rank,
            save=saving.save,
            bytes=save.snapshot.bytes,
            chunk_bytes=chunk_bytes,
            chunks=chunks,
            pieces=save.pieces,
            pieces_text=save.pieces_text,
            values=save.values,
            own=save.own,
        )

    def _wait_for_turn(self, number: int) -> None:
        limits = self._options.limits
        time.sleep(start_delay_s(self._world, limits))
        for rank in waits_for(self._world, limits):
            self._board.read(f"written/{number}/{rank}", timeout_s=self._options.timeout_s)

    def _end(self, save: Save, saving: Saving, mine: Part | None, *, leads_here: bool) -> None:
        """Commit, or learn that rank 0 did; a save that failed anywhere has failed everywhere."""
        key = f"outcome/{save.number}"
        try:
            if self._world.rank == 0:
                self._commit(save, saving, mine)
            else:
                note = checked(self._board.read(key, timeout_s=2 * self._options.timeout_s))
                if leads_here:
                    manifest = parse_manifest(note, name=saving.name)
                    texts = self._texts(save.number)
                    commit(self._tiers.root, saving, manifest, texts, rank=self._world.rank)
        except BaseException:
            discard(self._tiers.root, saving, rank=self._world.rank)
            raise
        self._tidies = self._world.rank == 0 or leads_here
        if self.drain:
            self.drain.committed(saving.name, leads_here=leads_here)

    def _commit(self, save: Save, saving: Saving, mine: Part | None) -> None:
        key = f"outcome/{save.number}"
        try:
            texts = self._texts(save.number)
            assert mine is not None  # else its description would be missing
            parts = [mine, *map(part_from_json, texts[1:])]
            manifest = make_manifest(saving, parts, texts)
            with span("checkpoint commit", step=save.step):
                commit(self._tiers.root, saving, manifest, texts, rank=self._world.rank)
        except BaseException as error:
            self._board.post(key, error_note(error))
            raise
        self._board.post(key, b"+" + manifest.to_json())

    def _texts(self, number: int) -> list[bytes]:
        """Every rank's description; which ranks are missing is said with the first failure."""
        deadline = time.monotonic() + self._options.timeout_s
        texts, faults = [], []
        for rank in range(self._world.size):
            left = max(0.0, deadline - time.monotonic())
            try:
                texts.append(checked(self._board.read(f"part/{number}/{rank}", timeout_s=left)))
            except StokerError as error:
                faults.append((rank, error))
        if faults:
            rank, first = faults[0]
            others = f" (and ranks {[one for one, _ in faults[1:]]})" if faults[1:] else ""
            raise CheckpointError(f"rank {rank} brought no part{others}: {first.message}", hint=first.hint)
        return texts

    def _forget_notes(self, stop: int) -> None:
        """Nobody reads the notes of saves before this one any more, also of those that were skipped."""
        if self._world.rank == 0:
            for number in range(self._forgotten, stop):
                self._board.forget(_notes_of(number, self._world.size))
            self._forgotten = max(self._forgotten, stop)

    def _retain(self) -> None:
        """Delete checkpoints that newer ones stand in for."""
        if self._tidies and not self.drain:
            with suppress(StokerError):  # what cannot go now goes after the next save
                retain(self._tiers, keep=self._options.keep, among=self._ours.has)


NOT_SAVED = "a checkpoint was not saved"
NOT_DRAINED = "a checkpoint is saved here, and not in the remote tier"


def failed(what: str, cause: BaseException) -> CheckpointError:
    """What a loop is told of a failure in the background."""
    reason = cause.message if isinstance(cause, StokerError) else f"{type(cause).__name__}: {cause}"
    hint = cause.hint if isinstance(cause, StokerError) else "see the cause above"
    error = CheckpointError(f"{what}: {reason}", hint=hint)
    error.__cause__ = cause
    return error


def _notes_of(number: int, size: int) -> Iterable[str]:
    yield from (f"{kind}/{number}" for kind in ("begin", "outcome", "verdict", "ready", "changed"))
    for rank in range(size):
        yield from (f"{kind}/{number}/{rank}" for kind in ("part", "written", "boxes", "dealt"))
