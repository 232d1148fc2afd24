"""A plain training loop fed and checkpointed by stoker; it resumes to the sample and the bit.

    python examples/plain_loop/train.py CORPUS --steps 100 --checkpoint run/
    torchrun --nproc-per-node=8 examples/plain_loop/train.py CORPUS --steps 100 --checkpoint run/

Kill it at any moment and run it again: it goes on where the newest checkpoint was, on any number of ranks.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
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
    parser.add_argument("--checkpoint", type=Path)
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
    with ExitStack() as stack:
        feeder = stack.enter_context(stoker.feed(given.corpus, batch_size=8, seq_len=LENGTH, device=device))
        saved = {"model": model, "optimizer": optimizer, "loader": feeder}
        done, checkpointer = 0, None
        if given.checkpoint:
            checkpointer = stack.enter_context(
                stoker.Checkpointer(given.checkpoint, every=given.every, keep=2)
            )
            done = checkpointer.restore(**saved).step
        while done < given.steps:
            for batch in feeder:  # one epoch; the next loop is the next epoch
                loss = torch.nn.functional.cross_entropy(
                    model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if world.rank == 0:
                    print(f"step {done}, loss {loss.item()!r}", flush=True)
                if checkpointer:
                    checkpointer.step(done, **saved)
                if done == given.steps:
                    break
        if checkpointer and done % given.every:
            checkpointer.save(done, **saved)
    if world.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
