"""Lightning's Trainer, saved and brought back by a Checkpointer.

    ck = stoker.Checkpointer("/nvme/run1", every=500, save_on_signal=("SIGTERM", "SIGUSR1"))
    trainer = lightning.Trainer(..., callbacks=[CheckpointCallback(ck)], enable_checkpointing=False)
    trainer.fit(model, loader)     # goes on from the newest checkpoint, if there is one
    ck.close()

A loader that has a state (`stoker.Loader`, torchdata's StatefulDataLoader) goes on at its place; Lightning
begins the epoch of any other anew.
"""

from __future__ import annotations

import warnings
from typing import Any

from stoker.errors import explained

try:
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from stoker.checkpoint.checkpointer import Checkpointer
    from stoker.checkpoint.snapshot.state import random_state, set_random_state
except ModuleNotFoundError as error:
    raise explained(error) from error


_OTHERS = "stoker others"  # beside the keys of the loops


class CheckpointCallback(Callback):
    """Saves module, optimizers, schedules, other callbacks, the scale of losses, a data module and the loops,
    with the place of the loader in them; what else is given, too. Any: their types are Lightning's."""

    def __init__(self, checkpointer: Checkpointer, **more: Any) -> None:
        self._ck, self._more = checkpointer, more
        self._random: Any = None  # of the step that was restored
        self._saved_at = -1

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        _warn_of_hooks([pl_module, *trainer.callbacks])
        restored = self._ck.restore(**self._objects(trainer, pl_module))
        if restored.fresh:
            return
        self._random, self._saved_at = random_state(), restored.step
        loops = restored.extras["loops"]
        states = loops.pop(_OTHERS, {})
        trainer.fit_loop.load_state_dict(loops)
        for name, one in _others(trainer).items():
            if name in states:
                one.load_state_dict(states[name])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        # Lightning has put its own in front meanwhile, which ends the job within a collective
        self._ck.catch_signals()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._random is not None:  # not before: sanity checks and samplers have drawn from it
            set_random_state(self._random)
            self._random = None

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._saved_at:
            return  # gradients are being gathered
        self._saved_at = trainer.global_step
        self._ck.step(trainer.global_step, **self._objects(trainer, pl_module))
        if self._ck.should_leave:
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if not self._ck.should_leave:
            self._ck.save(trainer.global_step, final=True, **self._objects(trainer, pl_module))

    def _objects(self, trainer: Any, pl_module: Any) -> dict[str, Any]:
        """Names as those of a Lightning checkpoint that is imported."""
        optimizers, found = trainer.optimizers, {"model": pl_module}
        for at, one in enumerate(optimizers):
            found["optimizer" if len(optimizers) == 1 else f"optimizer_{at}"] = one
        for at, config in enumerate(trainer.lr_scheduler_configs):
            found[f"scheduler_{at}"] = config.scheduler
        return {**found, "loops": _Loops(trainer), **self._more}


def _others(trainer: Any) -> dict[str, Any]:
    """What else in a Trainer has a state, by name: other callbacks (how long one has waited before it stops
    early, say), the scale of losses, a data module."""
    found = {f"callback {one.state_key}": one for one in trainer.callbacks}
    if trainer.datamodule is not None:
        found["datamodule"] = trainer.datamodule
    return {**found, "precision": trainer.precision_plugin}


def _warn_of_hooks(things: list[Any]) -> None:
    """What somebody adds to Lightning's own checkpoints by a hook would be missing in ours, in silence."""
    named = [type(one).__name__ for one in things if is_overridden("on_save_checkpoint", one, _kind(one))]
    if named:
        warnings.warn(
            f"on_save_checkpoint of {', '.join(named)} is not called for a Checkpointer: what it adds is not "
            "saved. Give it to CheckpointCallback by name, or keep it in a state_dict",
            RuntimeWarning,
            stacklevel=2,
        )


def _kind(thing: Any) -> type[Any]:
    return Callback if isinstance(thing, Callback) else LightningModule


class _Loops:
    """Lightning's loops, and what else it knows, as something to save, and not to be restored into: that must
    wait for its moment."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def state_dict(self) -> Any:
        states = {name: one.state_dict() for name, one in _others(self._trainer).items()}
        return {
            **self._trainer.fit_loop.state_dict(),
            _OTHERS: {name: one for name, one in states.items() if one},
        }
