"""Hugging Face Trainer fed by stoker: give it the loader, and keep the position in the checkpoint.

    python examples/hf_trainer/train.py CORPUS --steps 100 --output out

Hugging Face models shift the labels themselves: `labels="same"`. Trainer resumes by skipping batches from
the beginning of an epoch; `ignore_data_skip` leaves that to the loader, whose place is in the checkpoint.
Kill it and run it again: it goes on where the newest checkpoint was. On SIGTERM or SIGUSR1 to any rank all
save after the same step and leave.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import stoker
from stoker.integrations.transformers import CheckpointCallback

LENGTH, SIGNALS = 128, ("SIGTERM", "SIGUSR1")


class StokerTrainer(Trainer):
    """A Trainer that takes its batches from a loader."""

    def __init__(self, *args, train_loader, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._train_loader = train_loader

    def get_train_dataloader(self):
        return self._train_loader

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        if self.is_world_process_zero():
            print(f"step {self.state.global_step + 1}, loss {loss.item()!r}", flush=True)
        return loss


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="out")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    set_seed(0)
    config = GPT2Config(vocab_size=vocabulary, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        save_strategy="no",  # the callback does it
        lr_scheduler_type="constant",  # the default falls to 0 at max_steps: more steps would be another run
        per_device_train_batch_size=8,
        ignore_data_skip=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    with (
        stoker.Checkpointer(
            Path(given.output) / "checkpoints", every=given.every, keep=2, save_on_signal=SIGNALS
        ) as saver,
        stoker.Loader(given.corpus, batch_size=8, seq_len=LENGTH, labels="same") as loader,
    ):
        saving = CheckpointCallback(saver, loader=loader)
        trainer = StokerTrainer(
            model=GPT2LMHeadModel(config), args=arguments, train_loader=loader, callbacks=[saving]
        )
        found = trainer.train(resume_from_checkpoint=saving.resume(trainer))
    print(f"step {found.global_step} was the last")


if __name__ == "__main__":
    main()
