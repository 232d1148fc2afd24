"""A plain loop: micro-batches, evaluation, a save, a sleep no hook knows. Arguments: `kill`, `odd`."""

import os
import signal
import sys
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

STEPS, MICRO = 6, 2


class Odd(torch.Tensor):
    """A batch that fails whoever asks it how many tokens it holds."""

    @property
    def ndim(self):
        raise ValueError("asked for its ndim")


def train(mode: str) -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randint(0, 50, (STEPS * MICRO * 4, 16)))
    collate = (lambda rows: torch.stack([row[0] for row in rows]).as_subclass(Odd)) if mode == "odd" else None
    for number, batch in enumerate(DataLoader(data, batch_size=4, collate_fn=collate), 1):
        ids = torch.Tensor(batch).long() if mode == "odd" else batch[0]
        model(ids).sum().backward()
        if number % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for batch in DataLoader(TensorDataset(torch.randint(0, 50, (8, 16))), batch_size=4):
            model(batch[0])
    time.sleep(0.4)  # longer than its watcher ever looks away
    torch.save(model, os.devnull if mode else "model.pt")


if __name__ == "__main__":
    train(sys.argv[1] if len(sys.argv) > 1 else "")
    if sys.argv[1:] == ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    print("trained")
