"""Hugging Face's Trainer, saved and brought back by a Checkpointer.

ck = stoker.Checkpointer("/nvme/run1", every=500, save_on_signal=("SIGTERM", "SIGUSR1"))
saving = CheckpointCallback(ck)
trainer = Trainer(..., callbacks=[saving])                    # with save_strategy="no"
trainer.train(resume_from_checkpoint=saving.resume(trainer))  # nothing to resume: a fresh start
ck.close()
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.errors import CheckpointError, UsageError, explained

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    from stoker.checkpoint.checkpointer import Checkpointer
    from stoker.checkpoint.restore import Restored
    from stoker.checkpoint.snapshot.state import random_state, set_random_state
except ModuleNotFoundError as error:
    raise explained(error) from error

_STATE = "trainer_state.json"
_SCALER = "stoker scaler"  # beside the fields of a TrainerState


class CheckpointCallback(TrainerCallback):
    """Saves model, optimizer, schedule, the scale of losses, the Trainer's own count and the state of other
    callbacks; what else is given, say a loader that has a state, too. Any: their types are Hugging Face's."""

    def __init__(self, checkpointer: Checkpointer, **more: Any) -> None:
        self._ck, self._more = checkpointer, more
        self._random: Any = None  # of the step that was restored
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._trainer: Callable[[], Any] = lambda: None  # it has the other callbacks

    def resume(self, trainer: Any) -> str | None:
        """What `trainer.train(resume_from_checkpoint=...)` wants, so that it counts on and skips what it has
        read; nothing before the first checkpoint. Weights come later, from the checkpoint itself."""
        self._trainer = weakref.ref(trainer)
        found = self._ck.latest()
        if found is None:
            return None
        said = self._ck.load(name=found.name, keys=["trainer"]).get("trainer", "")
        if not said:
            raise UsageError(
                f"{found.name} was not saved from a Trainer",
                hint="give this run a folder of its own, and begin with restore(source=...)",
            )
        self._folder = tempfile.TemporaryDirectory(prefix="stoker-resume-")
        plain = json.loads(said)
        plain.pop(_SCALER, None)
        (Path(self._folder.name) / _STATE).write_text(json.dumps(plain))
        # it would look for files of weights in there; `on_train_begin` reads them for any parallelism
        trainer._load_from_checkpoint = lambda *_args, **_kwargs: None
        return self._folder.name

    # --- called by the Trainer ---

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        restored = self._ck.restore(**self._objects(state, kwargs))
        if self._folder:
            self._folder.cleanup()
        if not restored.fresh:
            self._random = random_state()
            plain = json.loads(restored.extras["trainer"])
            if (scaler := _scaler(kwargs)) and _SCALER in plain:
                scaler.load_state_dict(plain[_SCALER])
            self._count_on(state, restored, plain)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._random is not None:  # not before: the sampler has drawn from it since
            set_random_state(self._random)
            self._random = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._ck.step(state.global_step, **self._objects(state, kwargs))
        if self._ck.should_leave:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not self._ck.should_leave:
            self._ck.save(state.global_step, final=True, **self._objects(state, kwargs))

    def _objects(self, state: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        optimizer = kwargs["optimizer"]
        found = {
            "model": kwargs["model"],
            "optimizer": getattr(optimizer, "optimizer", optimizer),  # accelerate wraps it
            "scheduler": kwargs["lr_scheduler"],
            "trainer": json.dumps(self._known(state, kwargs)),
        }
        return {**found, **self._more}

    def _known(self, state: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        found = dataclasses.asdict(self._with_callbacks(state))
        scaler = _scaler(kwargs)
        return {**found, _SCALER: scaler.state_dict()} if scaler else found

    def _with_callbacks(self, state: Any) -> Any:
        """With the state of its other callbacks as it is now: the Trainer notes it in its own saves only."""
        trainer = self._trainer()
        if trainer is None:
            return state
        others = [one for one in trainer.callback_handler.callbacks if isinstance(one, ExportableState)]
        return dataclasses.replace(state, stateful_callbacks=others)

    def _count_on(self, state: Any, restored: Restored, plain: dict[str, Any]) -> None:
        """The Trainer has counted on by `resume`; with a loader that has its own place it may do so here."""
        if state.global_step == restored.step:
            return
        if state.global_step:
            raise CheckpointError(
                f"the Trainer resumed at step {state.global_step}, and the newest good checkpoint is of step "
                f"{restored.step}: {'; '.join(restored.skipped)}",
                hint="delete the one that was skipped, and start again",
            )
        if not any(hasattr(one, "load_state_dict") for one in self._more.values()):
            raise UsageError(
                f"{restored.name} is of step {restored.step}, and the Trainer would begin its data anew",
                hint="trainer.train(resume_from_checkpoint=callback.resume(trainer))",
            )
        for key, value in plain.items():
            if key in ("global_step", "epoch", "log_history", "best_metric", "total_flos"):
                setattr(state, key, value)


def _scaler(kwargs: dict[str, Any]) -> Any:
    """What scales losses of half precision, where something does: accelerate's optimizer holds it."""
    return getattr(kwargs["optimizer"], "scaler", None)
