"""Loader workers, forked and then spawned, that save something; a child that trains after a fork."""

import io
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Slow(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            torch.save(torch.zeros(2), io.BytesIO())  # what a worker does is not the loop's
        time.sleep(0.02)
        return torch.zeros(1024)


def train(method: str | None) -> None:
    model = torch.nn.Linear(1024, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workers = 2 if method else 0
    for batch in DataLoader(Slow(), batch_size=2, num_workers=workers, multiprocessing_context=method):
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    train("fork")
    train("spawn")
    child = os.fork()
    if not child:
        train(None)
        os._exit(0)
    os.waitpid(child, 0)
