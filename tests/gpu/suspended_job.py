"""A process that trains on a GPU and says the loss of every step: to be suspended and resumed.

suspended_job.py GIGABYTES STEPS
"""

from __future__ import annotations

import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch


def main() -> None:
    gigabytes, steps = float(sys.argv[1]), int(sys.argv[2])
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    held = torch.arange(int(gigabytes * 1e9 / 4), device="cuda", dtype=torch.float32)  # memory to be freed
    model = torch.nn.Sequential(
        torch.nn.Linear(1024, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 1024)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        loss = model(torch.randn(256, 1024, device="cuda")).pow(2).mean() + held[step * 1000] * 1e-6
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(repr(loss.item()), flush=True)
        time.sleep(0.02)  # so that it is still training when it is suspended


if __name__ == "__main__":
    main()
