"""A loop with Hugging Face accelerate. `prepare` takes the model and the optimizer; the loader is already
split by rank, so it stays as it is, and makes its batches on `accelerator.device`.

    accelerate launch examples/accelerate/train.py CORPUS --steps 100 --checkpoint run/

Kill it and run it again: it goes on where the newest checkpoint was. On SIGTERM or SIGUSR1 all ranks save
after the same step and leave. (Who keeps `accelerator.save_state` registers the loader,
`accelerator.register_for_checkpointing(feeder)`, and its position is saved too.)
"""

from __future__ import annotations

import argparse
from pathlib import Path

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
    parser.add_argument("--checkpoint", type=Path, default=Path("run"), help="folder of checkpoints")
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    given = parser.parse_args()
    accelerator = Accelerator()
    tokenizer = stoker.read_manifest(given.corpus).tokenizer
    vocabulary = tokenizer.vocabulary if tokenizer else 1 << 16
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(vocabulary, WIDTH), torch.nn.Linear(WIDTH, vocabulary))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    feeder = stoker.feed(given.corpus, device=str(accelerator.device), batch_size=8, seq_len=LENGTH)
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
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                accelerator.print(f"step {step}, loss {loss.item()!r}", flush=True)
                saver.step(step, **state)
                if step == given.steps or saver.should_leave:
                    break
        if not saver.should_leave:
            saver.save(step, final=True, **state)


if __name__ == "__main__":
    main()
