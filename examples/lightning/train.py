"""Lightning fed and saved by stoker: the loader is the train_dataloader, a callback saves it with the rest.
Kill it and run it again: it goes on where the newest checkpoint was. On SIGTERM or SIGUSR1 to any rank all
save after the same step and leave; the next run goes on there.

    python examples/lightning/train.py CORPUS --steps 100 --output out
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning
import torch

import stoker
from stoker.integrations.lightning import CheckpointCallback

WIDTH, LENGTH, SIGNALS = 64, 128, ("SIGTERM", "SIGUSR1")


class TinyModel(lightning.LightningModule):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary)
        )

    def training_step(self, batch, number):
        logits = self.layers(batch["input_ids"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        if self.global_rank == 0:
            print(f"step {self.global_step + 1}, loss {loss.item()!r}", flush=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--output", type=Path, default=Path("out"))
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    lightning.seed_everything(0, verbose=False)
    with (
        stoker.Checkpointer(
            given.output / "checkpoints", every=given.every, keep=2, save_on_signal=SIGNALS
        ) as saver,
        stoker.Loader(given.corpus, batch_size=8, seq_len=LENGTH) as loader,
    ):
        trainer = lightning.Trainer(
            max_steps=given.steps,
            use_distributed_sampler=False,  # the loader is split by rank already
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            enable_checkpointing=False,
            callbacks=[CheckpointCallback(saver)],
            accelerator="auto",
        )
        trainer.fit(TinyModel(vocabulary), train_dataloaders=loader)
        position = loader.state_dict()["position"]
    print(f"step {trainer.global_step}, position {position}")


if __name__ == "__main__":
    main()
