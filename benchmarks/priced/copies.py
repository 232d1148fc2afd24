"""Large batches of images copied to the card in the loop, out of plain memory.

`PREFETCH=1`: they lie in pinned memory and the next one is copied on a stream of its own meanwhile.
"""

import os

import torch
from parts import CUDA, DEVICE, Block, Clock, Profiled, adamw, autocast
from torch import nn

rows, side, patch = (256, 224, 16) if CUDA else (8, 32, 8)
width, layers = (768, 6) if CUDA else (32, 1)
prefetch = bool(os.environ.get("PREFETCH")) and CUDA


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.head = nn.Linear(width, 1)

    def forward(self, images):
        return self.head(self.blocks(self.cut(images).flatten(2).transpose(1, 2)).mean(1))


def plain(pool):
    """One after the other, copied when it is wanted."""
    number = 0
    while True:
        yield pool[number % len(pool)].to(DEVICE)
        number += 1


def ahead(pool):
    """The next one is under way while this one is trained on."""
    stream, number = torch.cuda.Stream(), 0

    def begin():
        with torch.cuda.stream(stream):
            return pool[number % len(pool)].to(DEVICE, non_blocking=True)

    coming = begin()
    while True:
        torch.cuda.current_stream().wait_stream(stream)
        batch = coming
        batch.record_stream(torch.cuda.current_stream())
        number += 1
        coming = begin()
        yield batch


pool = [torch.randn(rows, 3, side, side) for _ in range(3)]
pool = [batch.pin_memory() for batch in pool] if prefetch else pool
model = Regressor().to(DEVICE)
optimizer = adamw(model)
clock, profiled = Clock(), Profiled()
for batch in ahead(pool) if prefetch else plain(pool):
    with autocast():
        loss = model(batch).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if len(clock.ends) % 20 == 0:
        print(f"step {len(clock.ends)} loss {loss.item():.3f}")
    clock.step()
    profiled.step()
    if not clock.running():
        break
profiled.close()
clock.close()
