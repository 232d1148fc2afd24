"""One rank of a training job under torchrun: DDP, dropout, AdamW, fed and checkpointed by stoker.

train_job.py CORPUS FOLDER STEPS [STAND_AT]     prints the loss of every step; stands still after that one
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

import stoker


def main() -> None:
    corpus, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    stand_at = int(sys.argv[4]) if sys.argv[4:] else 0
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Embedding(97, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 97))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with (
        stoker.feed(corpus, batch_size=4, seq_len=32, device="cpu") as feeder,
        stoker.Checkpointer(folder, every=3, keep=2, timeout_s=30) as checkpointer,
    ):
        objects = {"model": model, "optimizer": optimizer, "loader": feeder}
        done = checkpointer.restore(**objects).step
        while done < steps:
            for batch in feeder:
                logits = model(batch["input_ids"] % 97)
                loss = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), (batch["labels"] % 97).flatten()
                )
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                done += 1
                if dist.get_rank() == 0:
                    print(f"step {done}, loss {loss.item()!r}", flush=True)
                while done == stand_at:  # until somebody kills it
                    time.sleep(1)
                checkpointer.step(done, **objects)
                if done == steps:
                    break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
