"""`Checkpointer`: saves the state of a training loop without stopping it, and brings it back.

    ck = stoker.Checkpointer("/nvme/run1", remote="s3://bucket/run1", every=500, keep=3)
    state = ck.restore(model=model, optimizer=opt, loader=feed)      # newest good one, or a fresh start
    for batch in feed:
        ...
        ck.step(step, model=model, optimizer=opt, loader=feed)       # returns at once

Every rank of the job makes one and calls the same methods with the same names.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from stoker.checkpoint.agree import Rounds, agreed_plan
from stoker.checkpoint.arena import Arena
from stoker.checkpoint.board import Board, SoloBoard, TcpBoard
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.plan import Plan, signature
from stoker.checkpoint.reader import Checkpoint
from stoker.checkpoint.restore import Restored, load_state, restore_objects
from stoker.checkpoint.saved import Saved
from stoker.checkpoint.saver import Save, Saver
from stoker.checkpoint.saver import Saved as Finished
from stoker.checkpoint.snapshot import Snapshot
from stoker.checkpoint.state import Flat, Objects, flatten, random_state, set_random_state
from stoker.checkpoint.storm import Advice, advise, mtbf_of
from stoker.checkpoint.tiers import FAR, Tiers
from stoker.checkpoint.values import encode
from stoker.errors import BadCheckpointError, CheckpointError, StokerError, UsageError
from stoker.spans import emit
from stoker.storage import local_path, open_store

_FIRST_AUTO_STEP = 10  # enough steps to know how long one takes


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointReport:
    """What a checkpointer did so far."""

    saves: int = 0
    skipped: int = 0
    failed: int = 0
    drained: int = 0
    bytes: int = 0  # of the last save, on this rank
    host_bytes: int = 0
    stall_s: float = 0.0  # how long the loop stood still for the last save
    write_s: float = 0.0  # until the last save was durable
    last: str = ""


class Checkpointer:
    """Saves and restores. `close` it (or use it as a context manager): that waits for the last save."""

    def __init__(self, root: str | Path, *, remote: str = "", **options: Any) -> None:
        self.options = CheckpointOptions(**options)
        self._world = self.options.world
        store = open_store(remote) if remote else None
        self._tiers = Tiers(root=local_path(root), remote=store)
        self._board: Board | None = None
        self._saver: Saver | None = None
        self._rounds: Rounds | None = None
        self._arena = Arena()
        self._plan: Plan | None = None
        self._snapshot: Snapshot | None = None
        self._pending: Future[Finished] | None = None
        self._failures: list[BaseException] = []
        self._checked: tuple[str, Checkpoint | None] = ("", None)
        self._report = CheckpointReport()
        self._due_at = _FIRST_AUTO_STEP
        self._last_step: tuple[int, float] | None = None
        self._step_s = 0.0

    # --- saving ---

    def step(self, step: int, /, **objects: Any) -> bool:
        """Call after every step: saves when a save is due. Whether one was begun."""
        self._clock(step)
        self._surface()
        return self._is_due(step) and self.save(step, **objects)

    def save(self, step: int, /, **objects: Any) -> bool:
        """Begin a save now. False when one is still being written and `when_busy` is "skip"."""
        started = time.monotonic()
        saver, rounds = self._start()
        self._settle()
        if self.options.when_busy == "wait":
            self._finish_pending()
        flat, broken = _flattened(objects)
        changed = self._plan is None or signature(flat) != self._plan.signature
        verdict = rounds.meet(changed=changed, busy=self._pending is not None and not self._pending.done())
        if not verdict.go:
            self._report = replace(self._report, skipped=self._report.skipped + 1)
            return False
        self._finish_pending()
        try:
            if broken:
                raise broken
            if verdict.replan or self._plan is None:
                self._plan = agreed_plan(rounds, objects, flat)
            self._begin(saver, rounds.number, step, flat, self._plan)
        except BaseException as error:
            self._plan = None
            saver.give_up(rounds.number, error)
            raise
        self._note_stall(started, step)
        return True

    def wait(self) -> None:
        """Return when the last save is durable; raises if it failed."""
        self._settle()
        self._finish_pending()
        self._surface()

    def close(self) -> None:
        """Wait for the last save and its drain, and give everything back; safe twice."""
        self._settle()
        self._finish_pending()
        if self._saver:
            self._saver.close()
        self._collect_drain_failure()
        if self._board:
            self._board.close()
        self._saver = self._board = self._rounds = None
        self._arena.close()
        self._surface()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except StokerError:
            if error is None:  # else what broke the loop is the news
                raise

    def report(self) -> CheckpointReport:
        drained = len(self._saver.drain.drained) if self._saver and self._saver.drain else 0
        return replace(self._report, drained=max(drained, self._report.drained), host_bytes=self._arena.bytes)

    def advice(self, *, mtbf_s: float = 0.0) -> Advice:
        """How often to save, from what saves have cost so far."""
        if not self._report.saves:
            raise UsageError("no save has been measured yet", hint="ask after the first save, or use every=")
        mtbf = mtbf_s or self.options.mtbf_s or mtbf_of(self._world.size)
        return advise(stall_s=self._report.stall_s, write_s=self._report.write_s, mtbf_s=mtbf)

    # --- restoring ---

    def restore(self, *, name: str = "", strict: bool = True, **objects: Any) -> Restored:
        """Bring objects back to the newest good checkpoint, or to `name`. With none: a fresh start.

        Plain values that were saved and are not among the objects come back in `extras`."""
        self._settle()
        self._finish_pending()
        _, rounds = self._start()
        skipped: list[str] = []
        candidates, touched = self._candidates(name, skipped), False
        while chosen := rounds.told(lambda: next(candidates, "")):
            saved: Saved | None = None
            error: StokerError | None = None
            try:
                saved = Saved(self._opened(chosen), rank=self._world.rank)
                extras = restore_objects(saved, objects, strict=strict)
            except StokerError as bad:
                error, touched = bad, True
            failure = rounds.all_well(error)
            if not failure and saved is not None:
                set_random_state(saved.own)
                extras.update(saved.extras(objects))
                self._due_at = saved.checkpoint.step + _FIRST_AUTO_STEP
                found = saved.checkpoint
                return Restored(step=found.step, name=found.name, extras=extras, skipped=tuple(skipped))
            skipped.append(f"{chosen}: {failure}")
        if name or touched:
            raise BadCheckpointError(
                f"no checkpoint in {self._tiers.root} could be restored: {'; '.join(skipped)}",
                hint="the objects may hold parts of a damaged one: start again with new ones",
            )
        return Restored(skipped=tuple(skipped))

    def load(self, *, name: str = "", keys: Sequence[str] = ("",)) -> dict[str, Any]:
        """The saved state itself, in new tensors on the CPU; only what begins with one of `keys`."""
        found = self._tiers.checkpoint(name) if name else self._tiers.latest()
        if found is None:
            raise UsageError(f"there is no checkpoint in {self._tiers.root}", hint="check the folder")
        return load_state(Saved(found, rank=self._world.rank), keys=keys)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole."""
        return self._tiers.latest()

    # --- inside ---

    def _start(self) -> tuple[Saver, Rounds]:
        """The board and the threads, when they are first needed: nothing happens in the constructor."""
        if self._saver is None or self._rounds is None or self._board is None:
            options = self.options
            self._board = (
                SoloBoard()
                if self._world.size == 1
                else TcpBoard(
                    self._tiers.root, self._world, address=options.board, timeout_s=options.timeout_s
                )
            )
            self._saver = Saver(self._tiers, self._board, options)
            self._rounds = Rounds(self._board, self._world, timeout_s=options.timeout_s)
        return self._saver, self._rounds

    def _begin(self, saver: Saver, number: int, step: int, flat: Flat, plan: Plan) -> None:
        tensors = plan.tensors(flat)
        chunk, limit = self.options.chunk_bytes, self.options.max_host_bytes
        everything = -(-plan.bytes // chunk) * chunk
        room = min(everything, max(limit // chunk, 2) * chunk) if limit else everything
        self._arena.ensure(room, pinned=any(tensor.is_cuda for tensor in tensors))
        snapshot = self._snapshot = Snapshot(self._arena, plan, tensors, chunk_bytes=chunk)
        save = Save(
            number=number,
            step=step,
            snapshot=snapshot,
            pieces=plan.pieces,
            values=_encoded(flat.values),
            own=_encoded(random_state()),
        )
        in_waves = room < plan.bytes
        if self.options.overlap or in_waves:
            self._pending = saver.submit(save)
        try:
            snapshot.copy_behind() if self.options.overlap else snapshot.copy()
        except Exception as error:
            snapshot.abort(error)
            if self._pending is None:  # else the save fails with it, and the next step says so
                raise
        if not (self.options.overlap or in_waves):  # writing beside the copy would only slow the copy down
            self._pending = saver.submit(save)

    def _settle(self) -> None:
        if self._snapshot is not None:
            self._snapshot.settle()
            self._snapshot = None

    def _finish_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        try:
            done = pending.result()
        except BaseException as error:
            self._failures.append(error)
            self._report = replace(self._report, failed=self._report.failed + 1)
            return
        self._report = replace(
            self._report, saves=self._report.saves + 1, last=done.name, write_s=done.write_s, bytes=done.bytes
        )

    def _surface(self) -> None:
        """Raise what failed in the background, with its cause."""
        if self._pending is not None and self._pending.done():
            self._finish_pending()
        self._collect_drain_failure()
        if not self._failures:
            return
        cause, self._failures = self._failures[-1], []
        reason = cause.message if isinstance(cause, StokerError) else f"{type(cause).__name__}: {cause}"
        hint = cause.hint if isinstance(cause, StokerError) else "see the cause above"
        error = CheckpointError(f"a checkpoint was not saved: {reason}", hint=hint)
        if self.options.on_failure == "raise":
            raise error from cause
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)

    def _collect_drain_failure(self) -> None:
        drain = self._saver.drain if self._saver else None
        failure = drain.take_failure() if drain else None
        if failure is not None:
            self._failures.append(failure)
        if drain:
            self._report = replace(self._report, drained=len(drain.drained))

    def _is_due(self, step: int) -> bool:
        if self.options.every == "auto":
            if step < self._due_at:
                return False
            _, rounds = self._start()
            self._due_at = step + int(rounds.told(lambda: str(self._auto_steps())))
            return True
        return bool(self.options.every) and step > 0 and step % int(self.options.every) == 0

    def _auto_steps(self) -> int:
        """Steps until the save after this one, as rank 0 reckons; few until one has been measured."""
        if self._pending is not None and self._pending.done():
            self._finish_pending()
        if not self._report.saves or not self._step_s:
            return _FIRST_AUTO_STEP
        return max(1, round(self.advice().interval_s / self._step_s))

    def _clock(self, step: int) -> None:
        now = time.monotonic()
        if self._last_step is not None and step > self._last_step[0]:
            one = (now - self._last_step[1]) / (step - self._last_step[0])
            self._step_s = 0.9 * self._step_s + 0.1 * one if self._step_s else one
        self._last_step = (step, now)

    def _note_stall(self, started: float, step: int) -> None:
        ended = time.monotonic()
        emit("checkpoint", start=started, end=ended, step=step)
        self._report = replace(self._report, stall_s=ended - started)

    def _candidates(self, name: str, skipped: list[str]) -> Iterator[str]:
        """The copies that are whole, the best first; only rank 0 looks."""
        copies = self._tiers.copies(said=skipped)
        for chosen in copies:
            if name and chosen.removesuffix(FAR) != name:
                continue
            for found in self._tiers.whole([chosen], skipped=skipped):
                self._checked = (chosen, found)
                yield chosen

    def _opened(self, chosen: str) -> Checkpoint:
        """The checkpoint that was chosen; rank 0 has read its descriptions already, when it checked it."""
        name, found = self._checked
        self._checked = ("", None)
        return found if found is not None and name == chosen else self._tiers.checkpoint(chosen)


def _encoded(values: dict[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((path, encode(value, name=".".join(map(str, path)))) for path, value in values.items())


def _flattened(objects: Objects) -> tuple[Flat, StokerError | None]:
    """What is to be saved; or why it cannot be, to be raised once the other ranks can be told."""
    try:
        return flatten(objects), None
    except StokerError as error:
        return Flat(), error
