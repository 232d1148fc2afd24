"""One rank of a training that Hugging Face's Trainer or Lightning runs, saved by stoker's callback; dropout
and a shuffled loader, so that only a whole state gives the same losses.

trainer_job.py hugging_face|lightning CORPUS FOLDER STEPS HOLD_AT   rank 1 waits there until it is told to go
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import stoker

RANK = os.environ["RANK"]
CORPUS, FOLDER = Path(sys.argv[2]), Path(sys.argv[3])
STEPS, HOLD_AT = int(sys.argv[4]), int(sys.argv[5])
WARNED = threading.Event()


def note(step: int, loss: float) -> None:
    """A step and its loss; then rank 1 may wait, and rank 0 with it in the next collective."""
    with (FOLDER / f"losses-{RANK}").open("a") as file:
        file.write(f"{step} {loss!r}\n")
    if step == HOLD_AT and RANK == "1":
        WARNED.wait()


def note_end(model: torch.nn.Module, left: bool) -> None:
    if not left:
        digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in model.state_dict().values()))
        (FOLDER / f"digest-{RANK}").write_text(digest.hexdigest())


def make_net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 6))


def hugging_face(saver: stoker.Checkpointer) -> None:
    from transformers import Trainer, TrainingArguments

    from stoker.integrations.transformers import CheckpointCallback

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def forward(self, x: Any) -> Any:
            return {"loss": (self.net(x) - x).pow(2).mean()}

    class Noting(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            note(self.state.global_step + 1, loss.item())
            return loss

    rows = [{"x": torch.full((6,), float(at)) / 50} for at in range(40)]
    arguments = TrainingArguments(
        output_dir=str(FOLDER / "out"), max_steps=STEPS, save_strategy="no", report_to=[], disable_tqdm=True,
        use_cpu=True, ddp_backend="gloo", per_device_train_batch_size=4, logging_steps=1000,
        learning_rate=1e-2,
    )  # fmt: skip
    saving = CheckpointCallback(saver)
    trainer = Noting(model=Net(), args=arguments, train_dataset=rows, callbacks=[saving])
    trainer.train(resume_from_checkpoint=saving.resume(trainer))
    note_end(trainer.model, saver.should_leave)


def lightning(saver: stoker.Checkpointer) -> None:
    import lightning

    from stoker.integrations.lightning import CheckpointCallback

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, number: int) -> Any:
            x = batch["input_ids"].float() / 900
            return (self.net(x) - x).pow(2).mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]

    class Noting(lightning.pytorch.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
            note(trainer.global_step, outputs["loss"].item())

    with stoker.Loader(CORPUS, batch_size=4, seq_len=6) as loader:
        trainer = lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", strategy="ddp", devices=2, use_distributed_sampler=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, logger=False,
            callbacks=[Noting(), CheckpointCallback(saver)],
        )  # fmt: skip
        model = Net()
        trainer.fit(model, loader)
    note_end(model, saver.should_leave)


if __name__ == "__main__":
    for each in (signal.SIGTERM, signal.SIGUSR1):  # before the saver's, which calls it
        signal.signal(each, lambda *_: WARNED.set())
    (FOLDER / f"pid-{RANK}").write_text(str(os.getpid()))
    signals = ("SIGTERM", "SIGUSR1")
    with stoker.Checkpointer(FOLDER / "checkpoints", every=3, save_on_signal=signals, grace_s=60) as saver:
        {"hugging_face": hugging_face, "lightning": lightning}[sys.argv[1]](saver)
