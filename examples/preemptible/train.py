"""Training that can be sent away at any moment, and goes on from the same sample elsewhere.

    torchrun --nproc-per-node=8 examples/preemptible/train.py CORPUS --steps 1000 --checkpoints /nvme/run1

On SIGUSR1 (Slurm's warning, see `stoker deploy slurm`) or SIGTERM (Kubernetes), to whichever rank it comes,
all ranks leave after the same step, with everything saved. Run it again and the losses are those of a run
that was never disturbed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

import stoker

WIDTH, LENGTH = 64, 128
SENT_AWAY = 75  # what a rank ends with that has not come to its last step: a Job would count 0 as done
SIGNALS, GRACE_S = ("SIGUSR1", "SIGTERM"), 120


Steps = Generator[tuple[int, float], None, bool]


def train(corpus: str, *, steps: int, folder: Path, cache: str | None = None, every: int = 500) -> Steps:
    """Steps from where the newest checkpoint is, each with its loss; in the end, whether all are done."""
    on_gpu = torch.cuda.is_available()
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    torch.manual_seed(0)
    model = make_model(corpus).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    feeder = stoker.feed(corpus, cache=cache, batch_size=4, seq_len=LENGTH)
    saver = stoker.Checkpointer(folder, every=every, keep=2, save_on_signal=SIGNALS, grace_s=GRACE_S)
    with feeder, saver:
        objects = {"model": model, "optimizer": optimizer, "loader": feeder}
        done = saver.restore(**objects).step
        ranks = DistributedDataParallel(model)
        while done < steps and not saver.should_leave:
            for batch in feeder:  # one epoch; the next loop is the next epoch
                logits = ranks(batch["input_ids"]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                done += 1
                yield done, loss.item()
                saver.step(done, **objects)
                if done == steps or saver.should_leave:
                    break
        if not saver.should_leave:
            saver.save(done, final=True, **objects)
    distributed.barrier()  # a launcher whose ranks have left may end the others: all have saved by then
    distributed.destroy_process_group()
    return done == steps


def make_model(corpus: str) -> torch.nn.Module:
    tokenizer = stoker.read_manifest(corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    return torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder that all ranks see")
    parser.add_argument("--cache", help="folder on this node's NVMe, where `stoker stage` put the corpus")
    parser.add_argument("--every", type=int, default=500, help="steps between checkpoints")
    given = parser.parse_args()
    steps = train(
        given.corpus, steps=given.steps, folder=given.checkpoints, cache=given.cache, every=given.every
    )
    for step, loss in whole(steps):
        if int(os.environ["RANK"]) == 0:
            print(f"step {step}, loss {loss!r}", flush=True)


def whole(steps: Steps) -> Iterator[tuple[int, float]]:
    if not (yield from steps):
        raise SystemExit(SENT_AWAY)


if __name__ == "__main__":
    main()
