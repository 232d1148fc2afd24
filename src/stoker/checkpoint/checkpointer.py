"""`Checkpointer`: saves the state of a training loop without stopping it, and brings it back.

    ck = stoker.Checkpointer("/nvme/run1", remote="s3://bucket/run1", every=500, keep=3)
    state = ck.restore(model=model, optimizer=opt, loader=feed)      # newest good one, or a fresh start
    for batch in feed:
        ...
        ck.step(step, model=model, optimizer=opt, loader=feed)       # returns at once

Every rank of the job makes one and calls the same methods with the same names.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from stoker.checkpoint.agree import Rounds, agreed_plan
from stoker.checkpoint.board import Board, SoloBoard, TcpBoard
from stoker.checkpoint.drain import Loaders
from stoker.checkpoint.interval import Advice, Interval, advise, mtbf_of, whole_step
from stoker.checkpoint.options import CheckpointOptions, CheckpointReport
from stoker.checkpoint.restore import Restored, load_state, restore_newest
from stoker.checkpoint.saver import NOT_DRAINED, NOT_SAVED, Save, Saver, failed
from stoker.errors import CheckpointError, StokerError, UsageError, check_options
from stoker.saved.reader import Checkpoint
from stoker.saved.tiers import Tiers
from stoker.saved.values import encode
from stoker.snapshot.arena import Arena
from stoker.snapshot.copy import Snapshot
from stoker.snapshot.plan import Plan
from stoker.snapshot.state import Flat, Objects, flatten, random_state
from stoker.snapshot.tensors import Saved
from stoker.spans import emit
from stoker.storage import absolute, is_local, local_path, open_store

# The share of a copy before writing begins. Small machine, 1.85 GiB: with none of it the stall is a third
# longer, with all of it the time to durable a fifth.
_HEAD_START = 0.25


class Checkpointer:
    """Saves and restores. `close` it (or use it as a context manager): that waits for the last save."""

    def __init__(self, root: str | Path, *, remote: str = "", **options: Any) -> None:
        check_options(options, CheckpointOptions.__slots__, of="a checkpointer")
        self.options = CheckpointOptions(**options)
        self._world = self.options.world
        if not is_local(root):
            raise UsageError(
                f"{root} is no folder of this node", hint=f"give a folder, and the store as remote='{root}'"
            )
        store = open_store(absolute(remote)) if remote else None
        self._tiers = Tiers(root=local_path(root).absolute(), remote=store)
        self._board: Board | None = None
        self._saver: Saver | None = None
        self._rounds: Rounds | None = None
        self._arena = Arena()
        self._plan: Plan | None = None
        self._snapshot: Snapshot | None = None
        self._loaders = Loaders(self.options.busy)
        self._leave: Any = None  # a finalizer
        self._pid = 0  # of the process that saves
        self._allocating: threading.Thread | None = None
        self._failures: list[CheckpointError] = []
        self._report, self._interval = CheckpointReport(), Interval(self.options.every)

    # --- saving ---

    def step(self, step: int, /, **objects: Any) -> bool:
        """Call after every step: saves when a save is due. Whether one was begun."""
        step = whole_step(step)
        self._interval.note(step)
        self._loaders.note(objects.values())
        self._surface()
        if self._is_due(step):
            return self.save(step, **objects)
        if self.options.every and (self._rounds is None or self._rounds.fresh):
            self._prepare(objects)
        return False

    def save(self, step: int, /, **objects: Any) -> bool:
        """Begin a save now. False when one is still being written and `when_busy` is "skip"."""
        started, step = time.monotonic(), whole_step(step)
        saver, rounds = self._start()
        self._settle()
        if self.options.when_busy == "wait":
            self._finish_pending()
            self._surface()  # before the ranks meet: one that failed may not come any more
        flat, broken = _flattened(objects)
        changed = self._plan is None or not self._plan.fits(flat)
        saver.collect_once()
        verdict = rounds.meet(changed=changed, busy=self.is_saving)
        if not verdict.go:
            self._report = replace(self._report, skipped=self._report.skipped + 1)
            return False
        self._finish_pending()
        try:
            if broken:
                rounds.refuse(broken)  # the others may be waiting for what this rank holds
                raise broken
            if verdict.replan or self._plan is None:
                self._plan = agreed_plan(rounds, objects, flat)
            save = self._snapshot_of(flat, self._plan, number=rounds.number, step=step, asked_at=started)
            self._begin(saver, save)
        except BaseException as error:
            self._plan = None
            saver.give_up(rounds.number, error)
            raise
        self._note_stall(started, step)
        return True

    @property
    def is_saving(self) -> bool:
        """Whether a save is still being written."""
        pending = self._saver.pending if self._saver else None
        return pending is not None and not pending.done()

    def wait(self) -> None:
        """Return when the last save is durable; raises if it failed."""
        self._settle()
        self._finish_pending()
        self._surface()

    def close(self) -> None:
        """Wait for the last save and its drain, and give everything back; safe twice."""
        if self._is_forked:
            return
        self._settle()
        self._finish_pending()
        if self._saver and self._board:
            self._leave.detach()
            self._saver.close()
            self._collect_drain_failure()
            self._board.close()
        self._saver = self._board = self._rounds = None
        self._allocated()
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
        settle_s = self._snapshot.settle_s if self._snapshot else 0.0
        return replace(
            self._report,
            drained=max(drained, self._report.drained),
            host_bytes=self._arena.bytes,
            stall_s=self._report.stall_s + settle_s,
        )

    def advice(self, *, mtbf_s: float = 0.0) -> Advice:
        """How often to save, from what saves have cost so far."""
        report = self.report()
        if not report.saves:
            raise UsageError("no save has been measured yet", hint="ask after the first save, or use every=")
        mtbf = mtbf_s or self.options.mtbf_s or mtbf_of(self._world.size)
        return advise(stall_s=report.stall_s, write_s=report.durable_s, mtbf_s=mtbf)

    # --- restoring ---

    def restore(self, *, name: str = "", strict: bool = True, **objects: Any) -> Restored:
        """Bring objects back to the newest good checkpoint, or to `name`. With none: a fresh start.

        Plain values that were saved and are not among the objects come back in `extras`."""
        self._settle()
        self._finish_pending()
        saver, rounds = self._start()
        restored = restore_newest(self._tiers, rounds, objects, name=name, strict=strict)
        _warn_of_skipped(restored.skipped if self._world.rank == 0 else ())
        self._interval.restored(restored.step)
        saver.note_newest(restored.name)
        return restored

    def load(self, *, name: str = "", keys: Sequence[str] = ("",)) -> dict[str, Any]:
        """The saved state itself, in new tensors on the CPU; only what begins with one of `keys`."""
        found = self._tiers.checkpoint(name) if name else self.latest()
        if found is None:
            raise UsageError(f"there is no checkpoint in {self._tiers.root}", hint="check the folder")
        return load_state(Saved(found, rank=self._world.rank), keys=keys)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; why newer ones are not is said as a warning."""
        skipped: list[str] = []
        found = self._tiers.latest(skipped=skipped)
        _warn_of_skipped(skipped)
        return found

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
            self._saver = Saver(self._tiers, self._board, options, busy=self._loaders.behind)
            self._rounds = Rounds(self._board, self._world, timeout_s=options.timeout_s)
            self._pid = os.getpid()
            self._leave = weakref.finalize(self, _leave, self._saver, self._board, self._pid)
        return self._saver, self._rounds

    @property
    def _is_forked(self) -> bool:
        """Whether a save that is under way is that of this process's parent."""
        return self._saver is not None and os.getpid() != self._pid

    def _check_process(self) -> None:
        if self._is_forked:
            raise UsageError(
                "this Checkpointer was made before the process was forked; its saves stay with the parent",
                hint="save in the parent, or start processes with spawn",
            )

    def _prepare(self, objects: Objects) -> None:
        """Plan at the first step, and allocate while the loop goes on: touching and pinning gigabytes takes
        seconds, which the first save need not wait for."""
        saver, rounds = self._start()
        flat, _ = _flattened(objects)
        rounds.fresh = False
        plan = self._plan = agreed_plan(rounds, objects, flat)
        pinned = any(tensor.is_cuda for tensor in plan.tensors(flat))

        def allocate() -> None:
            saver.collect_once()
            with suppress(StokerError, OSError):  # the save will meet it too, and say so
                self._arena.ensure(self._room(plan), pinned=pinned)

        self._allocating = threading.Thread(target=allocate, name="stoker-arena")
        self._allocating.start()

    def _room(self, plan: Plan) -> int:
        """Host memory for a snapshot: all of it, or as much as is allowed, in whole chunks."""
        chunk, limit = self.options.chunk_bytes, self.options.max_host_bytes
        everything = -(-plan.bytes // chunk) * chunk
        return min(everything, max(limit // chunk, 2) * chunk) if limit else everything

    def _allocated(self) -> None:
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None

    def _snapshot_of(self, flat: Flat, plan: Plan, *, number: int, step: int, asked_at: float) -> Save:
        tensors = plan.tensors(flat)
        self._allocated()
        self._arena.ensure(self._room(plan), pinned=any(tensor.is_cuda for tensor in tensors))
        head_start = 0.0 if self.options.overlap else _HEAD_START
        self._snapshot = Snapshot(
            self._arena, plan, tensors, chunk_bytes=self.options.chunk_bytes, head_start=head_start
        )
        return Save(
            number=number,
            step=step,
            asked_at=asked_at,
            snapshot=self._snapshot,
            pieces=plan.pieces,
            pieces_text=plan.pieces_text,
            values=_encoded(flat.values),
            own=_encoded(random_state()),
        )

    def _begin(self, saver: Saver, save: Save) -> None:
        """Copy, and write what is copied; what goes wrong fails the save, and the next step says so."""
        assert self._snapshot is not None
        saver.submit(save)
        try:
            self._snapshot.copy_behind() if self.options.overlap else self._snapshot.copy()
        except BaseException as error:
            self._snapshot.abort(error)  # or what writes would wait for the rest for ever
            if not isinstance(error, Exception):
                raise

    def _settle(self) -> None:
        if self._snapshot is not None:
            self._snapshot.settle()
            self._report = replace(self._report, stall_s=self._report.stall_s + self._snapshot.settle_s)
            self._snapshot = None

    def _finish_pending(self) -> None:
        self._check_process()
        if self._saver is None or self._saver.pending is None:
            return
        # who is interrupted here waits again, or it would be forgotten
        error = self._saver.pending.exception()
        pending, self._saver.pending = self._saver.pending, None
        if error is not None:
            self._failures.append(failed(NOT_SAVED, error))
            self._report = replace(self._report, failed=self._report.failed + 1)
            return
        done = pending.result()
        self._report = replace(
            self._report,
            saves=self._report.saves + 1,
            last=done.name,
            durable_s=done.durable_s,
            bytes=done.bytes,
        )
        if done.warning:
            warnings.warn(done.warning, RuntimeWarning, stacklevel=3)

    def _surface(self) -> None:
        """Raise what failed in the background, with its cause."""
        if not self.is_saving:
            self._finish_pending()
        self._collect_drain_failure()
        if not self._failures:
            return
        error, self._failures = self._failures[-1], []
        if self.options.on_failure == "raise":
            raise error
        warnings.warn(str(error), RuntimeWarning, stacklevel=3)

    def _collect_drain_failure(self) -> None:
        drain = self._saver.drain if self._saver else None
        failure = drain.take_failure() if drain else None
        if failure is not None:
            self._failures.append(failed(NOT_DRAINED, failure))
        if drain:
            self._report = replace(self._report, drained=len(drain.drained))

    def _is_due(self, step: int) -> bool:
        return self._interval.is_due(step, steps=self._steps_to_the_next)

    def _steps_to_the_next(self) -> int:
        """As rank 0 reckons."""
        _, rounds = self._start()
        if not self.is_saving:
            self._finish_pending()
        advice = self.advice() if self._report.saves else None
        return int(rounds.told(lambda: str(self._interval.advised_steps(advice))))

    def _note_stall(self, started: float, step: int) -> None:
        ended = time.monotonic()
        emit("checkpoint", start=started, end=ended, step=step)
        self._report = replace(self._report, stall_s=ended - started)


def _leave(saver: Saver, board: Board, pid: int) -> None:
    """For a loop that ends without `close`: the last save and its drain are finished all the same, and the
    log is told of a failure, since no step is left that could raise it. Not in a forked child, which has
    neither the threads nor a connection of its own."""
    if os.getpid() != pid:
        return
    saver.close()
    drained, saved = saver.drain and saver.drain.take_failure(), saver.pending and saver.pending.exception()
    for what, cause in ((NOT_DRAINED, drained), (NOT_SAVED, saved)):
        if cause:
            warnings.warn(str(failed(what, cause)), RuntimeWarning, stacklevel=2)
    board.close()


def _warn_of_skipped(skipped: Sequence[str]) -> None:
    for one in skipped:
        warnings.warn(f"a checkpoint was skipped: {one}", RuntimeWarning, stacklevel=3)


def _encoded(values: dict[Any, Any]) -> tuple[tuple[Any, Any], ...]:
    return tuple((path, encode(value, name=".".join(map(str, path)))) for path, value in values.items())


def _flattened(objects: Objects) -> tuple[Flat, StokerError | None]:
    """What is to be saved; or why it cannot be, to be raised once the other ranks can be told."""
    try:
        return flatten(objects), None
    except StokerError as error:
        return Flat(), error
