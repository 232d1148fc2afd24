"""What a trainer of others knows beside weights comes back too: counts of callbacks, scales of losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import stoker
from stoker.world import World

pytestmark = pytest.mark.integration

ROWS = torch.arange(24.0).view(6, 4) / 24


def opened(folder: Path) -> stoker.Checkpointer:
    return stoker.Checkpointer(folder / "run", every=1, world=World())


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # Lightning's own
def test_the_callbacks_of_lightning_and_its_scale_of_losses_come_back(
    tmp_path: Path, skip_or_fail: Any
) -> None:
    lightning = imported("lightning.pytorch", skip_or_fail)
    from lightning.pytorch.callbacks import EarlyStopping
    from lightning.pytorch.plugins import MixedPrecision

    from stoker.integrations.lightning import CheckpointCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, number: int) -> Any:
            self.log("flat", 1.0)
            return self.net(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 1

    def fit(epochs: int) -> tuple[int, float]:
        early = EarlyStopping("flat", patience=50, check_on_train_epoch_end=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        with opened(tmp_path) as saver:
            trainer = lightning.Trainer(
                max_epochs=epochs, accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False,
                enable_model_summary=False, logger=False, log_every_n_steps=1,
                plugins=[MixedPrecision("16-mixed", "cpu", scaler)],
                callbacks=[early, CheckpointCallback(saver)],
            )  # fmt: skip
            with pytest.warns(RuntimeWarning, match="on_save_checkpoint of Net is not called"):
                trainer.fit(Net(), torch.utils.data.DataLoader(ROWS, batch_size=2))
        return early.wait_count, scaler.get_scale()

    assert fit(2) == (1, 4.0 * 2**6)
    assert fit(2) == (1, 4.0 * 2**6)  # nothing was left to do
    assert fit(3) == (2, 4.0 * 2**9)


def test_the_callbacks_of_hugging_face_come_back(tmp_path: Path, skip_or_fail: Any) -> None:
    transformers = imported("transformers", skip_or_fail)
    from transformers.trainer_callback import ExportableState, TrainerCallback

    from stoker.integrations.transformers import CheckpointCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return {"loss": self.net(x).pow(2).mean()}

    class Counting(TrainerCallback, ExportableState):
        def __init__(self) -> None:
            self.seen = 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seen += 1

        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"seen": self.seen}}

    def train(steps: int) -> int:
        with opened(tmp_path) as saver:
            arguments = transformers.TrainingArguments(
                output_dir=str(tmp_path / "out"), max_steps=steps, save_strategy="no", report_to=[],
                disable_tqdm=True, use_cpu=True, per_device_train_batch_size=2, logging_steps=1000,
                restore_callback_states_from_checkpoint=True,
            )  # fmt: skip
            saving = CheckpointCallback(saver)
            rows = [{"x": row} for row in ROWS]
            trainer = transformers.Trainer(
                model=Net(), args=arguments, train_dataset=rows, callbacks=[Counting(), saving]
            )
            trainer.train(resume_from_checkpoint=saving.resume(trainer))
        (counting,) = [one for one in trainer.callback_handler.callbacks if isinstance(one, Counting)]
        return counting.seen

    assert [train(3), train(7)] == [3, 7]


def test_the_scale_of_losses_in_half_precision_of_hugging_face_comes_back(
    tmp_path: Path, skip_or_fail: Any
) -> None:
    """accelerate makes one for GPUs only: given to it here, as it would be there."""
    transformers = imported("transformers", skip_or_fail)
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer

    from stoker.integrations.transformers import CheckpointCallback

    Accelerator(cpu=True)

    def scale_after(steps: int) -> float:
        model, state = torch.nn.Linear(2, 2), transformers.TrainerState()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer.optimizer, 3)
        given = {"model": model, "optimizer": optimizer, "lr_scheduler": schedule}
        with opened(tmp_path) as saver:
            saving = CheckpointCallback(saver)
            state.global_step = saver.latest().step if saver.latest() else 0
            saving.on_train_begin(None, state, transformers.TrainerControl(), **given)
            for _ in range(steps):
                scaler.scale(model(torch.ones(2)).sum()).backward()
                scaler.step(optimizer.optimizer)
                scaler.update()
                state.global_step += 1
                saving.on_step_end(None, state, transformers.TrainerControl(), **given)
        return scaler.get_scale()

    assert [scale_after(3), scale_after(1)] == [4.0 * 2**3, 4.0 * 2**4]


def imported(name: str, skip_or_fail: Any) -> Any:
    try:
        return __import__(name, fromlist=["_"])
    except ModuleNotFoundError:
        return skip_or_fail(f"{name} is not installed")
