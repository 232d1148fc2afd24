"""Background save: write this rank's part, commit with the others, drain.

A thread for each save, which the interpreter waits for when a script just ends; one that drains, which ends
with `close`. How a save ended is known from its future, on every rank alike: rank 0 tells the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from stoker.checkpoint.board import Board, checked, error_note
from stoker.checkpoint.drain import Drain
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.proof import prove
from stoker.checkpoint.saved.commit import (
    Saving,
    begin,
    commit,
    discard,
    join,
    leads_here,
    make_manifest,
    put_part,
    wait_for_folder,
)
from stoker.checkpoint.saved.layout import (
    Marks,
    Part,
    Piece,
    parse_manifest,
    part_from_json,
    part_name,
    sequence_of,
)
from stoker.checkpoint.saved.retention import Ours
from stoker.checkpoint.saved.tiers import Tiers, local_names
from stoker.checkpoint.saved.writer import Source, write_part
from stoker.checkpoint.shelf import Shelf
from stoker.checkpoint.storm import reads_after, start_delay_s, waits_for
from stoker.checkpoint.turns import Turns
from stoker.errors import BadCheckpointError, CheckpointError, StokerError
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
    marks: Marks = field(default_factory=Marks)


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
        self._shelf = Shelf(tiers.root, options, ours=self._ours)
        self._troubles: list[tuple[str, StokerError]] = []
        limits, world = options.limits, options.world
        self._writes = self._crowd("write", waits_for(world, limits), limits.write_bytes_per_s)
        self.reads = self._crowd("read", reads_after(world, limits), limits.read_bytes_per_s)

    def _crowd(self, what: str, after: Iterable[int], bytes_per_s: float) -> Turns:
        return Turns(
            self._board,
            rank=self._world.rank,
            after=after,
            what=what,
            timeout_s=self._options.timeout_s,
            bytes_per_s=bytes_per_s,
        )

    def collect_once(self) -> None:
        """Delete what killed runs left on this node, before anybody here needs the room."""
        with self._collecting:
            if not self._has_collected and self._world.local_rank == 0:
                with suppress(OSError, StokerError):  # the save will meet it too, and say so
                    self._shelf.collect()
            self._has_collected = True

    def note_restored(self, name: str, *, skipped: Sequence[str]) -> None:
        """All ranks have read this one: those to come are newer, and the copy here is good, unless it was
        skipped."""
        self._newest = max(self._newest, sequence_of(name) or 0)
        if name and not any(one.startswith(f"{name}:") for one in skipped):
            self._shelf.proven.add(name)

    def take_troubles(self) -> list[tuple[str, StokerError]]:
        """What went wrong beside saves: (what was not "good", "drained" or "tidied", why)."""
        troubles, self._troubles = self._troubles, []
        return [*troubles, *(self.drain.take_failures() if self.drain else ())]

    def _noting_trouble(self, tidy: Callable[[], object], *, damage: str = "tidied") -> bool:
        """Whether it went well; if not, what that was is noted, and `damage` if it is damage."""
        try:
            tidy()
        except StokerError as error:
            self._troubles.append((damage if isinstance(error, BadCheckpointError) else "tidied", error))
            return False
        return True

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
        self._writes.done(number)  # or those after it would wait for its turn to end

    def close(self) -> None:
        if self._thread:
            self._thread.join()
        if self.drain:
            self.drain.close()
            if self._tidies:  # what it was reading when the last save was done
                self._noting_trouble(lambda: self._shelf.retain(spare=()))
        self._shelf.sweep()

    def _work(self, save: Save, future: Future[Finished], before: threading.Thread | None) -> None:
        if before:
            before.join()  # it is durable, but may still be deleting older ones
        try:
            done, written = self._run(save)
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(done)
            proven = self._noting_trouble(lambda: self._prove(save.number, done.name, written), damage="good")
            if proven and self._tidies:
                spare = {self.drain.holding} if self.drain else ()
                self._noting_trouble(lambda: self._shelf.retain(spare=spare))
        self._forget_notes(save.number - 1)

    def _run(self, save: Save) -> tuple[Finished, tuple[Part, bytes]]:
        """How it ended, and what this rank has written of it."""
        saving, leads_here = self._begin(save)
        self._ours.add(saving.name)
        mine: BaseException | None = None
        part: Part | None = None
        text = b""
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
        except StokerError:
            if mine is not None:  # this rank knows better than what came back from rank 0
                raise mine from None
            raise
        assert part is not None  # or the save would have failed
        done = Finished(
            name=saving.name,
            step=save.step,
            bytes=save.snapshot.bytes,
            durable_s=time.monotonic() - save.asked_at,
            warning=self._of_strangers() if self._world.rank == 0 else "",
        )
        return done, (part, text)

    def _of_strangers(self) -> str:
        """What to say if another job puts checkpoints beside those of this one."""
        root = self._tiers.root
        with suppress(OSError):
            if not all(map(self._ours.has, local_names(root))):
                return (
                    f"another job saves into {root}, or another Checkpointer of this one: each keeps its own "
                    "newest checkpoints, but a restart takes the newest of all. Give each a folder of its own"
                )
        return ""

    def _begin(self, save: Save) -> tuple[Saving, bool]:
        """The save's temporary folder, and whether this rank commits it on a node that is not rank 0's."""
        key = f"begin/{save.number}"
        try:
            if self._world.local_rank == 0:
                self._shelf.sweep()
                self._shelf.make_room(spare={self.drain.holding} if self.drain else ())
            if self._world.rank == 0:
                saving = begin(self._tiers.root, step=save.step, sequence=self._next_sequence(save.step))
                self._board.post(key, b"+" + saving.to_json())
                return saving, False
            note = checked(self._board.read(key, timeout_s=self._options.timeout_s, of=0, moving="write"))
            saving = join(self._tiers.root, note)
            if self._world.local_rank == 0:
                return saving, leads_here(self._tiers.root, saving)
            wait_for_folder(self._tiers.root, saving, timeout_s=self._options.timeout_s)
            return saving, False
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
        time.sleep(start_delay_s(self._world, self._options.limits))
        with self._writes.turn(save.number):
            path = saving.folder(self._tiers.root) / part_name(self._world.rank, "bin")
            chunk_bytes = self._options.chunk_bytes
            chunks = write_part(path, save.snapshot, chunk_bytes=chunk_bytes, pace=self._writes.pace)
            save.snapshot.finish()
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

    def _end(self, save: Save, saving: Saving, mine: Part | None, *, leads_here: bool) -> None:
        """Commit, or learn that rank 0 did; a save that failed anywhere has failed everywhere."""
        key = f"outcome/{save.number}"
        try:
            if self._world.rank == 0:
                self._commit(save, saving, mine)
            else:
                timeout_s = 2 * self._options.timeout_s  # rank 0 has to wait for others before it says
                note = checked(self._board.read(key, timeout_s=timeout_s, of=0, moving="write"))
                if leads_here:
                    manifest = parse_manifest(note, name=saving.name)
                    texts = self._texts(save.number)
                    commit(self._tiers.root, saving, manifest, texts, rank=self._world.rank)
        except BaseException:
            discard(self._tiers.root, saving, rank=self._world.rank)
            if self._world.local_rank == 0:
                self._shelf.failed(saving)
            raise
        self._tidies = self._world.rank == 0 or leads_here
        if self.drain:
            self.drain.committed(saving.name)

    def _commit(self, save: Save, saving: Saving, mine: Part | None) -> None:
        key = f"outcome/{save.number}"
        try:
            texts = self._texts(save.number)
            assert mine is not None  # else its description would be missing
            parts = [mine, *map(part_from_json, texts[1:])]
            manifest = make_manifest(saving, parts, texts, marks=save.marks)
            with span("checkpoint commit", step=save.step):
                commit(self._tiers.root, saving, manifest, texts, rank=self._world.rank)
        except BaseException as error:
            self._board.post(key, error_note(error))
            raise
        self._board.post(key, b"+" + manifest.to_json())

    def _texts(self, number: int) -> list[bytes]:
        """Every rank's description; which ranks are missing is said with the first failure."""
        texts, faults, timeout_s = [], [], self._options.timeout_s
        for rank in range(self._world.size):
            key = f"part/{number}/{rank}"
            try:
                texts.append(checked(self._board.read(key, timeout_s=timeout_s, of=rank, moving="write")))
            except StokerError as error:
                faults.append((rank, error))
                timeout_s = 0.0 if "in vain" in error.message else timeout_s
        if faults:
            rank, first = faults[0]
            others = f" (and ranks {[one for one, _ in faults[1:]]})" if faults[1:] else ""
            raise CheckpointError(f"rank {rank} brought no part{others}: {first.message}", hint=first.hint)
        return texts

    def _prove(self, number: int, name: str, written: tuple[Part, bytes]) -> None:
        if self._shelf.deletes:
            timeout_s, board, world = self._options.timeout_s, self._board, self._world
            prove(self._tiers.root, name, number, board, world, written=written, timeout_s=timeout_s)
            self._shelf.proven.add(name)

    def _forget_notes(self, stop: int) -> None:
        """Nobody reads the notes of saves before this one any more, also of those that were skipped."""
        if self._world.rank == 0:
            for number in range(self._forgotten, stop):
                self._board.forget(_notes_of(number, self._world.size))
            self._forgotten = max(self._forgotten, stop)


def _notes_of(number: int, size: int) -> Iterable[str]:
    yield from (f"{kind}/{number}" for kind in ("begin", "outcome", "verdict", "ready", "changed"))
    yield f"proof/{number}/all"
    for rank in range(size):
        kinds = ("part", "write/done", "proof", "boxes", "dealt", "standing")
        yield from (f"{kind}/{number}/{rank}" for kind in kinds)
