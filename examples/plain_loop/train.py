"""A plain training loop fed by stoker, with a checkpoint that resumes to the sample.

    python examples/plain_loop/train.py CORPUS --steps 100 --checkpoint state.pt
    torchrun --nproc-per-node=8 examples/plain_loop/train.py CORPUS --steps 100 --checkpoint state.pt

Run it again and it goes on where the checkpoint was, on any number of ranks.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import stoker

WIDTH, LENGTH = 64, 128


def make_model(vocabulary: int) -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path)
    given = parser.parse_args()
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    model = make_model(tokenizer.vocabulary if tokenizer else 1 << 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    with stoker.feed(given.corpus, batch_size=8, seq_len=LENGTH) as feeder:
        if given.checkpoint and given.checkpoint.exists():
            saved = torch.load(given.checkpoint, weights_only=True)
            model.load_state_dict(saved["model"])
            feeder.load_state_dict(saved["feeder"])
            done = saved["done"]
        while done < given.steps:
            for batch in feeder:  # one epoch; the next loop is the next epoch
                model.to(batch["input_ids"].device)
                loss = torch.nn.functional.cross_entropy(
                    model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == given.steps:
                    break
        if given.checkpoint:
            state = {"model": model.state_dict(), "feeder": feeder.state_dict(), "done": done}
            torch.save(state, given.checkpoint)
    print(f"step {done}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
