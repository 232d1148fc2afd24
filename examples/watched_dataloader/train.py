"""A loop of its own with a plain DataLoader, watched without a change to it; only its checkpoints are
stoker's.

    stoker watch --out run -- python examples/watched_dataloader/train.py CORPUS --steps 100 --checkpoint out/
    stoker diagnose run

The verdict says whether the DataLoader keeps up, and if not what to change. A DataLoader has no position: the
order of an epoch is drawn from its number, and after a restart its beginning is left out without reading it.
(`stoker.Loader(Rows(CORPUS), batch_size=8)` does that by itself, on any number of ranks.)
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import stoker

WIDTH, LENGTH, BATCH = 64, 128, 8


class Rows(Dataset):
    """As many people have it: token ids in a file, a row is the next so many."""

    def __init__(self, corpus: str) -> None:
        manifest = stoker.read_manifest(corpus)
        shard = Path(corpus) / f"{manifest.shards[0].name}.bin"
        self._ids = np.memmap(shard, np.dtype(manifest.dtype), mode="r")

    def __len__(self) -> int:
        return (len(self._ids) - 1) // LENGTH

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = number * LENGTH
        row = torch.from_numpy(self._ids[at : at + LENGTH + 1].astype(np.int64))
        return row[:-1], row[1:]


class FromStep(Sampler):
    """A shuffled epoch, the rest of it after a restart."""

    def __init__(self, rows: int, *, step: int) -> None:
        self._rows = rows
        self._epoch, self._done = divmod(step, rows // BATCH)

    def __iter__(self) -> Iterator[int]:
        drawn = torch.Generator().manual_seed(self._epoch)
        yield from torch.randperm(self._rows, generator=drawn)[self._done * BATCH :].tolist()
        self._epoch, self._done = self._epoch + 1, 0

    def __len__(self) -> int:
        return self._rows - self._done * BATCH


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("out"), help="folder of checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = Rows(given.corpus)
    state = {"model": model, "optimizer": optimizer}
    with stoker.Checkpointer(
        given.checkpoint, every=given.every, keep=2, save_on_signal=("SIGTERM", "SIGUSR1")
    ) as saver:
        step = saver.restore(**state).step  # of the newest good checkpoint; 0 is a fresh start
        loader = DataLoader(rows, BATCH, sampler=FromStep(len(rows), step=step), drop_last=True)
        while step < given.steps and not saver.should_leave:
            for ids, labels in loader:  # an epoch, or the rest of one
                step += 1
                loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                print(f"step {step}, loss {loss.item()!r}", flush=True)
                saver.step(step, **state)
                if step == given.steps or saver.should_leave:
                    break
        if not saver.should_leave:
            saver.save(step, final=True, **state)


if __name__ == "__main__":
    main()
