"""Two ranks of DistributedDataParallel on gloo; rank 1 comes late to every step."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(32, 32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    if dist.get_rank() == 1:
        time.sleep(0.4)  # longer than its watcher ever looks away
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.all_reduce(torch.ones(4))
dist.destroy_process_group()
