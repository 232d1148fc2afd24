"""`Checkpointer`: saves the state of a training loop without stopping it, and brings it back.

    ck = stoker.Checkpointer("/nvme/run1", remote="s3://bucket/run1", every=500, keep=3)
    state = ck.restore(model=model, optimizer=opt, loader=feed)      # newest good one, or a fresh start
    for batch in feed:
        ...
        ck.step(step, model=model, optimizer=opt, loader=feed)       # returns at once
        if ck.should_leave:                                          # some rank was told to; all have saved
            break

Every rank of the job makes one and calls the same methods with the same names.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from stoker.checkpoint.agree import loose_digest
from stoker.checkpoint.copies import Copies
from stoker.checkpoint.drain import Loaders
from stoker.checkpoint.foreign.restoring import refuse_a_foreign_folder, restore_source
from stoker.checkpoint.interval import Advice, Interval, advise, mtbf_of, whole_step
from stoker.checkpoint.leave import Goodbye, Notice, is_done, unfinished, unsaved
from stoker.checkpoint.loading.match import Loading, Rename
from stoker.checkpoint.notes import Standing, standing_of_save
from stoker.checkpoint.options import CheckpointOptions, CheckpointReport, as_metric, telling
from stoker.checkpoint.outcomes import Outcomes
from stoker.checkpoint.planning import Planning
from stoker.checkpoint.restore import Restored, load_state, restore_newest, warn_of_rounded, warn_of_skipped
from stoker.checkpoint.saved.layout import Marks
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.tiers import Tiers
from stoker.checkpoint.saver import Save, Saver
from stoker.checkpoint.session import Session, alone
from stoker.checkpoint.snapshot.state import Objects
from stoker.checkpoint.snapshot.tensors import Saved
from stoker.errors import StokerError, UsageError
from stoker.options import takes
from stoker.spans import FOLDER, RESTORED, emit, is_recording
from stoker.storage import absolute, is_local, local_path, open_store


class Checkpointer:
    """Saves and restores. `close` it (or use it as a context manager): that waits for the last save."""

    @takes(CheckpointOptions, of="a checkpointer")
    def __init__(self, options: CheckpointOptions) -> None:
        self.options, self._world = options, options.world
        root, remote = options.root, options.remote
        if not is_local(root):
            raise UsageError(
                f"{root} is no folder of this node", hint=f"give a folder, and the store as remote='{root}'"
            )
        if local_path(root).is_file():
            raise UsageError(
                f"{root} is a file, and a run needs a folder",
                hint=f"give a folder of its own; restore(source='{root}', ...) begins with what is in a file",
            )
        store = open_store(absolute(remote), timeout_s=options.remote_timeout_s) if remote else None
        self._tiers = Tiers(root=local_path(root).absolute(), remote=store)
        self._session: Session | None = None
        self._finalizer: Any = None  # of weakref, where there is a session
        self._loaders = Loaders(options.busy)
        self._copies = Copies(options)
        self._planning = Planning(options, self._copies)
        self._outcomes = Outcomes(options)
        self._interval, self._was_saving = Interval(options.every), False
        self._notice, self._leaves = Notice(options.save_on_signal), False
        self._turn = threading.RLock()
        self._untold: tuple[float, float, int | None] | None = None  # a restore before anybody recorded

    # --- saving ---

    def step(self, step: int, /, **objects: Any) -> bool:
        """Call after every step: saves when a save is due. Whether one was begun."""
        step = whole_step(step)
        self._tell_restored()
        self._interval.note(step, saving=self._was_saving)
        self._was_saving = self.is_saving
        self._loaders.note(objects.values())
        self._surface()
        if goodbye := self._goodbye(step):
            return self._save_and_leave(goodbye, step, objects)
        if self._is_due(step):
            return self._save(step, objects, Marks())
        if self.options.every and (self._session is None or self._session.rounds.fresh):
            session = self._start()
            self._planning.prepare(session.rounds, objects, before=session.saver.collect_once)
        return False

    def save(
        self,
        step: int,
        /,
        *,
        final: bool = False,
        metric: float | None = None,
        pin: str = "",
        **objects: Any,
    ) -> bool:
        """Begin a save now. False when one is still being written and `when_busy` is "skip". One that is
        `final`, at the end of a run, is never skipped, and durable when this returns. `metric` is what
        `keep_best` goes by; with a `pin`, a word of yours, it is kept for good."""
        marks = Marks(reason="final" if final else "", metric=as_metric(metric), pin=pin)
        saved = self._save(whole_step(step), objects, marks)
        if final:
            self.wait()
        return saved

    @property
    def should_leave(self) -> bool:
        """Whether the loop should end now: a signal of `save_on_signal` came to some rank, and what the last
        `step` was given is saved. The same on all ranks, after the same step."""
        return self._leaves

    def catch_signals(self) -> None:
        """Take the signals of `save_on_signal` again, where a framework has put its own handlers in front."""
        self._notice.take()

    def _save(self, step: int, objects: Objects, marks: Marks) -> bool:
        with alone(self._turn):
            return self._save_alone(step, objects, marks)

    def _save_alone(self, step: int, objects: Objects, marks: Marks) -> bool:
        started = time.monotonic()
        session = self._start()
        saver, rounds = session.saver, session.rounds
        self._settle()
        if self.options.when_busy == "wait" or marks.reason:
            self._finish_pending()
            self._surface()  # before the ranks meet: one that failed may not come any more
        flat, broken = self._planning.flattened(objects)
        plan = self._planning.fitting(flat)
        saver.collect_once()
        verdict = rounds.meet(
            standing_of_save(step, [*objects], self.options),
            changed=plan is None or not plan.checked or self._planning.is_due_again(flat),
            busy=self.is_saving,
            loose=loose_digest(flat, plan, turn=rounds.number, waits=not self.options.overlap),
        )
        if not verdict.go:
            self._outcomes.skipped()
            return False
        self._finish_pending()
        try:
            if broken:
                rounds.refuse(broken)  # the others may be waiting for what this rank holds
                raise broken
            plan = self._planning.agreed(rounds, objects, flat, replan=verdict.replan)
            save = self._planning.save_of(flat, plan, number=rounds.number, step=step, asked_at=started)
            self._begin(saver, replace(save, marks=marks))
        except BaseException as error:
            self._planning.forget()
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
        if self._session and self._session.is_forked:
            return
        self._settle()
        self._finish_pending()
        self._notice.close()
        if self._session:
            self._finalizer.detach()
            self._session.close()
            self._outcomes.collect(self._session.saver)
        self._session = None
        self._copies.close()
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
        report, copies = self._outcomes.reported(self._saver), self._copies
        stall_s = report.stall_s + copies.settle_s
        return replace(
            report,
            host_bytes=copies.host_bytes,
            stall_s=stall_s,
            check_s=self._planning.check_s + copies.check_s,
            lost_s=max(self._interval.lost_s, stall_s),
        )

    def advice(self, *, mtbf_s: float = 0.0) -> Advice:
        """How often to save, from what saves have cost so far."""
        report = self.report()
        if not report.saves:
            raise UsageError("no save has been measured yet", hint="ask after the first save, or use every=")
        mtbf = mtbf_s or self.options.mtbf_s or mtbf_of(self._world.size)
        return advise(stall_s=report.stall_s, lost_s=report.lost_s, write_s=report.durable_s, mtbf_s=mtbf)

    # --- restoring ---

    def restore(
        self,
        *,
        name: str = "",
        source: str | Path = "",
        strict: bool = True,
        rename: Rename | None = None,
        mismatched: Literal["raise", "skip", "grow"] = "raise",
        dtypes: Literal["exact", "warn", "cast"] = "warn",
        **objects: Any,
    ) -> Restored:
        """Bring objects back to the newest good checkpoint, or to `name`. With none: a fresh start, from
        `source` if there is one: a checkpoint of others (DCP, Hugging Face, torch.save, safetensors,
        Lightning, Megatron) or of another run. Objects that are not in there stay as they are.

        Plain values that were saved and are not among the objects come back in `extras`; what was and was not
        restored stands in `report`, the same on every rank. For a model that has changed since: `rename`
        gives names of the checkpoint their names here (a function, or a mapping of names or beginnings of
        names; None leaves one out), `mismatched` and `dtypes` say what may become of other shapes and dtypes,
        `strict=False` leaves alone what is missing on either side."""
        policy = Loading(strict=strict, rename=rename, mismatched=mismatched, dtypes=dtypes)
        started = time.monotonic()
        with alone(self._turn):
            restored = self._restore(policy, objects, name=name, source=source)
        self._untold = started, time.monotonic(), None if restored.fresh else restored.step
        self._tell_restored()
        return restored

    def _restore(self, policy: Loading, objects: Objects, *, name: str, source: str | Path) -> Restored:
        self._settle()
        self._finish_pending()
        session = self._start()
        saver, rounds = session.saver, session.rounds
        rounds.agree(
            Standing(doing="restore", objects=sorted(objects), options=policy.told() | {"name": name})
        )
        restored = restore_newest(self._tiers, rounds, saver.reads, objects, name=name, policy=policy)
        if restored.fresh:
            rounds.told(lambda: "" if source else refuse_a_foreign_folder(self._tiers))
            if source:
                restored = restore_source(source, rounds, objects, policy=policy)
        warn_of_skipped(restored.skipped if self._world.rank == 0 else ())
        warn_of_rounded(restored.rounded if self._world.rank == 0 and policy.dtypes == "warn" else ())
        self._say(restored.line(self._tiers.root))
        self._interval.restored(restored.step)
        saver.note_restored(restored.name, skipped=restored.skipped)
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
        warn_of_skipped(skipped)
        return found

    # --- inside ---

    def _start(self) -> Session:
        """The board and the threads, when they are first needed: nothing happens in the constructor."""
        if self._session is None:
            self._session = Session(self._tiers, self.options, self._notice, busy=self._loaders.behind)
            self._finalizer = weakref.finalize(self, self._session.finish_quietly)
        return self._session

    @property
    def _saver(self) -> Saver | None:
        return self._session.saver if self._session else None

    def _check_process(self) -> None:
        if self._session and self._session.is_forked:
            raise UsageError(
                "this Checkpointer was made before the process was forked; its saves stay with the parent",
                hint="save in the parent, or start processes with spawn",
            )

    def _begin(self, saver: Saver, save: Save) -> None:
        """Copy, and write what is copied; `on_save` is told how that ended."""
        saver.submit(save)
        if self.options.on_save and saver.pending:
            saver.pending.add_done_callback(telling(self.options.on_save, save.step))
        self._copies.take()

    def _settle(self) -> None:
        self._outcomes.settled(self._copies.settle())

    def _finish_pending(self) -> None:
        self._check_process()
        saver = self._saver
        if saver is None or saver.pending is None:
            return
        saver.pending.exception()  # who is interrupted here waits again, or it would be forgotten
        pending, saver.pending = saver.pending, None
        self._outcomes.ended(pending)

    def _surface(self) -> None:
        """Raise what failed in the background, with its cause, or warn of it."""
        if not self.is_saving:
            self._finish_pending()
        if self._saver:
            self._outcomes.collect(self._saver)
        self._outcomes.troubles.surface()

    # --- leaving ---

    def _goodbye(self, step: int) -> Goodbye | None:
        if self._leaves or not self.options.save_on_signal:
            return None
        return self._start().leaving.after(step)

    def _save_and_leave(self, goodbye: Goodbye, step: int, objects: Objects) -> bool:
        """Save with the others what there is, in the time that is left."""
        self._leaves = True
        if not goodbye.agreed:
            warnings.warn(unsaved(goodbye), RuntimeWarning, stacklevel=3)
            return False
        left = goodbye.left_s(self.options.grace_s)
        rounds = self._start().rounds
        rounds.timeout_s = min(self.options.timeout_s, left())
        try:
            saved = self._save(step, objects, Marks(reason=goodbye.reason))
        finally:
            rounds.timeout_s = self.options.timeout_s
        self._settle()
        if self._saver and self._saver.pending and not is_done(self._saver.pending, within_s=left()):
            warnings.warn(unfinished(goodbye, step, self.options.grace_s), RuntimeWarning, stacklevel=3)
            return saved
        self.wait()
        self._say(
            f"{goodbye.reason}: step {step} is saved as {self._outcomes.report.last}, the loop may leave"
        )
        return saved

    def _say(self, line: str) -> None:
        if self._world.rank == 0:
            self.options.say(line)

    # --- how often ---

    def _is_due(self, step: int) -> bool:
        return self._interval.is_due(step, steps=self._steps_to_the_next)

    def _steps_to_the_next(self) -> int:
        """As rank 0 reckons."""
        rounds = self._start().rounds
        if not self.is_saving:
            self._finish_pending()
        advice = self.advice() if self._outcomes.report.saves else None
        return int(rounds.told(lambda: str(self._interval.advised_steps(advice))))

    def _tell_restored(self) -> None:
        """To whoever watches: a recording begins with the first step, most often after the restore."""
        if self._untold and is_recording():
            (start, end, step), self._untold = self._untold, None
            emit(RESTORED, start=start, end=end, step=step)
            emit(f"{FOLDER}{self._tiers.root}", start=end, end=end)

    def _note_stall(self, started: float, step: int) -> None:
        ended = time.monotonic()
        emit("checkpoint", start=started, end=ended, step=step)
        self._outcomes.stalled(ended - started)
        self._interval.saved()
        self._was_saving = True
