"""Reads a dataset as a training program would, however it was started, and notes what this process read.

python launched.py HOW DATASET FOLDER
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path

RANKS = 2


def read(dataset: str, folder: str, loader=None) -> None:
    """One epoch; the loader may have been made before the ranks were given out."""
    import stoker

    with loader or stoker.Loader(dataset, batch_size=4, seq_len=32, output="numpy") as loader:
        rows = [int(row[0]) for batch in loader for row in batch["input_ids"]]
        note = {"rows": rows, "rank": loader.options.world.rank, "size": loader.options.world.size}
    Path(folder, f"{uuid.uuid4()}.json").write_text(json.dumps(note))


def initialised(dataset: str, folder: str) -> None:
    """torch.distributed is initialised after the loader was made, and after it was asked for its length."""
    import torch.distributed as dist

    import stoker

    loader = stoker.Loader(dataset, batch_size=4, seq_len=32, output="numpy")
    assert len(loader) > 0
    dist.init_process_group("gloo")
    read(dataset, folder, loader)
    dist.destroy_process_group()


def spawned(rank: int, dataset: str, folder: str, size: int = RANKS, first: int = 0, meet: str = "") -> None:
    import torch.distributed as dist

    meet = meet or f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meet, rank=first + rank, world_size=size)
    read(dataset, folder)
    dist.destroy_process_group()


def spawn(dataset: str, folder: str) -> None:
    import torch.multiprocessing as mp

    mp.spawn(spawned, args=(dataset, folder), nprocs=RANKS)


def spawn_in_tasks(dataset: str, folder: str) -> None:
    """Each task of a step starts two ranks by itself."""
    import torch.multiprocessing as mp

    first = RANKS * int(os.environ["SLURM_PROCID"])
    mp.spawn(spawned, args=(dataset, folder, 2 * RANKS, first), nprocs=RANKS)


def accelerated(dataset: str, folder: str) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    read(dataset, folder)
    accelerator.end_training()


def debug_launched(dataset: str, folder: str) -> None:
    from accelerate import debug_launcher

    debug_launcher(accelerated, args=(dataset, folder), num_processes=RANKS)


def lightning(dataset: str, folder: str) -> None:
    """As their tutorials have it: the Trainer starts the other rank, when fit is called."""
    import lightning
    import torch

    import stoker

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.rows = torch.nn.Linear(1, 1), []

        def training_step(self, batch, _number):
            self.rows += batch["input_ids"][:, 0].tolist()
            return self.layer(batch["input_ids"][:, :1].float()).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.0)

    model, loader = Model(), stoker.Loader(dataset, batch_size=4, seq_len=32)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=RANKS, strategy="ddp", max_epochs=1, logger=False,
        enable_checkpointing=False, enable_model_summary=False, enable_progress_bar=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    trainer.fit(model, loader)
    note = {"rows": model.rows, "rank": loader.options.world.rank, "size": loader.options.world.size}
    Path(folder, f"{uuid.uuid4()}.json").write_text(json.dumps(note))
    loader.close()


WAYS = {
    "plain": read,
    "initialised": initialised,
    "spawn": spawn,
    "spawn_in_tasks": spawn_in_tasks,
    "accelerated": accelerated,
    "debug_launched": debug_launched,
    "lightning": lightning,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](*sys.argv[2:])
