"""nanoGPT's way: the loop makes its batches itself, and no DataLoader can be set."""

import time

import numpy as np
import torch

torch.manual_seed(0)
data = np.arange(1 << 16, dtype=np.int64)
model = torch.nn.Sequential(torch.nn.Embedding(1 << 16, 16), torch.nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def get_batch():
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until:
        starts = torch.randint(len(data) - 64, (8,))
        rows = torch.stack([torch.from_numpy(data[int(start) : int(start) + 64]) for start in starts])
    return rows


for _ in range(100_000):
    loss = model(get_batch()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
