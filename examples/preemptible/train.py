"""Training that can be sent away at any moment, and goes on from the same sample elsewhere.

    torchrun --nproc-per-node=8 examples/preemptible/train.py CORPUS --steps 1000 --checkpoint state.pt

On SIGUSR1 (Slurm's warning, see `stoker deploy slurm`) or SIGTERM (Kubernetes) all ranks leave after the same
step, with everything saved. Run it again and the losses are those of a run that was never disturbed.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import stoker

WIDTH, LENGTH = 64, 128


class Notice:
    """Remembers that this rank was told to go; asks whether any was, so that all leave together."""

    def __init__(self) -> None:
        self.came = False
        for each in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(each, self._note)

    def _note(self, *_: object) -> None:
        self.came = True

    def came_anywhere(self, device: torch.device) -> bool:
        flag = torch.tensor(int(self.came), device=device)
        distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
        return bool(flag)


def train(
    corpus: str, *, steps: int, checkpoint: Path, notice: Notice, cache: str | None = None
) -> Iterator[tuple[int, float]]:
    """Steps from where the checkpoint is, each with its loss; saves at the end, or when notice came."""
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = make_model(corpus).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with stoker.feed(corpus, cache=cache, batch_size=4, seq_len=LENGTH) as feeder:
        done = restore(checkpoint, model, optimizer, feeder) if checkpoint.exists() else 0
        ranks = DistributedDataParallel(model)
        while done < steps:
            for batch in feeder:  # one epoch; the next loop is the next epoch
                logits = ranks(batch["input_ids"]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                yield done, loss.item()
                if done == steps or (leaves := notice.came_anywhere(device)):
                    break
            if done == steps or leaves:
                break
        save(checkpoint, model, optimizer, feeder, done)
    distributed.destroy_process_group()


def make_model(corpus: str) -> torch.nn.Module:
    tokenizer = stoker.read_manifest(corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    return torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary))


def restore(
    checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, feeder: stoker.Feeder
) -> int:
    saved = torch.load(checkpoint, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    feeder.load_state_dict(saved["feeder"])
    return int(saved["done"])


def save(
    checkpoint: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    feeder: stoker.Feeder,
    done: int,
) -> None:
    """Whole or not at all; nobody leaves before it is there."""
    if distributed.get_rank() == 0:
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "feeder": feeder.state_dict(),
            "done": done,
        }
        new = checkpoint.with_name(f"{checkpoint.name}.new")
        torch.save(state, new)
        os.replace(new, checkpoint)
    distributed.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--cache", help="folder on this node's NVMe, where `stoker stage` put the corpus")
    given = parser.parse_args()
    notice = Notice()
    steps = train(
        given.corpus, steps=given.steps, checkpoint=given.checkpoint, notice=notice, cache=given.cache
    )
    for step, loss in steps:
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}, loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
