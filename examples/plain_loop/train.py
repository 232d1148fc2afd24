"""A plain training loop fed and checkpointed by stoker; it resumes to the sample and the bit.

    python examples/plain_loop/train.py CORPUS --steps 100 --checkpoint run/
    torchrun --nproc-per-node=8 examples/plain_loop/train.py CORPUS --steps 100 --checkpoint run/

Kill it at any moment and run it again: it goes on where the newest checkpoint was, on any number of ranks. On
SIGTERM or SIGUSR1 all ranks save after the same step and leave.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist

import stoker

WIDTH, LENGTH = 64, 128


def make_model(vocabulary: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, vocabulary)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="folder of checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    world = stoker.World.from_environ()
    device = f"cuda:{world.local_rank}" if torch.cuda.is_available() else "cpu"
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    model = make_model(tokenizer.vocabulary if tokenizer else 1 << 16).to(device)
    if world.size > 1:
        dist.init_process_group()
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    feeder = stoker.feed(given.corpus, batch_size=8, seq_len=LENGTH, device=device)
    saver = stoker.Checkpointer(
        given.checkpoint, every=given.every, keep=2, save_on_signal=("SIGTERM", "SIGUSR1")
    )
    state = {"model": model, "optimizer": optimizer, "loader": feeder}
    with feeder, saver:
        step = saver.restore(**state).step  # of the newest good checkpoint; 0 is a fresh start
        while step < given.steps and not saver.should_leave:
            for batch in feeder:  # an epoch, or the rest of one
                step += 1
                logits = model(batch["input_ids"]).flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, batch["labels"].flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if world.rank == 0:
                    print(f"step {step}, loss {loss.item()!r}", flush=True)
                saver.step(step, **state)
                if step == given.steps or saver.should_leave:
                    break
        if not saver.should_leave:
            saver.save(step, final=True, **state)
    if world.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
