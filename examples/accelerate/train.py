"""A loop with Hugging Face accelerate. `prepare` takes the model and the optimizer; the loader is already
split by rank, so it stays as it is, and batches are moved with `accelerator.device`.

    accelerate launch examples/accelerate/train.py CORPUS --steps 100
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator

import stoker

WIDTH, LENGTH = 64, 128


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("corpus")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args()
    accelerator = Accelerator()
    vocabulary = 1 << 16
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    with stoker.feed(given.corpus, device=str(accelerator.device), batch_size=8, seq_len=LENGTH) as feeder:
        # with registration, accelerator.save_state and load_state keep the position too
        accelerator.register_for_checkpointing(feeder)
        done = 0
        while done < given.steps:
            for batch in feeder:
                logits = model(batch["input_ids"])
                loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if done == given.steps:
                    break
    accelerator.print(f"step {done}, loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
