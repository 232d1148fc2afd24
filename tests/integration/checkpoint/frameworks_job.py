"""What Hugging Face and Lightning save comes in, and what goes out they read; in a process of their own.

frameworks_job.py hugging_face|lightning FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

import stoker
from stoker.checkpoint.foreign.importing import import_checkpoint
from stoker.checkpoint.foreign.opening import open_source
from stoker.checkpoint.saved.export import export
from stoker.world import World


def hugging_face(folder: Path) -> None:
    for shard_size in ("5GB", "4KB"):
        there_and_back(folder / shard_size, shard_size)


def there_and_back(folder: Path, shard_size: str) -> None:
    theirs, mine = gpt2(0), gpt2(1)
    theirs.save_pretrained(folder / "hf", max_shard_size=shard_size)
    with stoker.Checkpointer(folder / "run", world=World()) as ck:
        ck.restore(source=folder / "hf", model=mine)
        assert same(mine, theirs)
        import_checkpoint(open_source(folder / "hf"), folder / "run")
        export(ck.latest(), folder / "back", shard_bytes=4000)
    theirs.config.save_pretrained(folder / "back")
    assert same(type(theirs).from_pretrained(folder / "back"), theirs)


def gpt2(seed: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=97, n_positions=16, n_embd=8, n_layer=2, n_head=2))


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def lightning(folder: Path) -> None:
    import lightning

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.layer(batch).pow(2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=3, accelerator="cpu", enable_checkpointing=False, **quiet)
    theirs, mine = Model(), Model()
    trainer.fit(theirs, torch.utils.data.DataLoader(torch.rand(12, 4), batch_size=4))
    trainer.save_checkpoint(folder / "last.ckpt")
    optimizer = torch.optim.AdamW(mine.parameters())
    with stoker.Checkpointer(folder / "run", world=World()) as ck:
        restored = ck.restore(source=folder / "last.ckpt", model=mine, optimizer=optimizer)
    assert restored.step == 3
    assert same(mine, theirs)
    found, given = optimizer.state_dict()["state"], trainer.optimizers[0].state_dict()["state"]
    assert all(torch.equal(found[at]["exp_avg"], given[at]["exp_avg"]) for at in given)


if __name__ == "__main__":
    {"hugging_face": hugging_face, "lightning": lightning}[sys.argv[1]](Path(sys.argv[2]))
