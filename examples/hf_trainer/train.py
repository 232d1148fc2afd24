"""Hugging Face Trainer fed by stoker: give it the loader, and keep the position in the checkpoint.

    python examples/hf_trainer/train.py CORPUS --steps 100 --output out

Hugging Face models shift the labels themselves: `labels="same"`. Trainer resumes by skipping batches from
the beginning of an epoch; `ignore_data_skip` leaves that to the loader, whose state the callback saves
beside each checkpoint.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import stoker

LENGTH, STATE = 128, "stoker.json"


class StokerTrainer(Trainer):
    """A Trainer that takes its batches from a loader."""

    def __init__(self, *args, train_loader, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._train_loader = train_loader

    def get_train_dataloader(self):
        return self._train_loader


class SavePosition(TrainerCallback):
    def __init__(self, loader: stoker.Loader) -> None:
        self._loader = loader

    def on_save(self, args, state, control, **kwargs) -> None:
        folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
        if state.is_world_process_zero:
            (folder / STATE).write_text(json.dumps(self._loader.state_dict()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", default="out")
    given = parser.parse_args()
    config = GPT2Config(vocab_size=1 << 16, n_positions=LENGTH, n_embd=32, n_layer=1, n_head=2)
    arguments = TrainingArguments(
        output_dir=given.output,
        max_steps=given.steps,
        save_steps=max(1, given.steps // 2),
        per_device_train_batch_size=8,
        ignore_data_skip=True,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    with stoker.Loader(given.corpus, batch_size=8, seq_len=LENGTH, labels="same") as loader:
        latest = get_last_checkpoint(given.output) if Path(given.output).is_dir() else None
        if latest:
            loader.load_state_dict(json.loads((Path(latest) / STATE).read_text()))
        trainer = StokerTrainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_loader=loader,
            callbacks=[SavePosition(loader)],
        )
        found = trainer.train(resume_from_checkpoint=latest)
    print(f"step {found.global_step}, loss {found.training_loss:.3f}")


if __name__ == "__main__":
    main()
