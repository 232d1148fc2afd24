"""A small GPT on small batches: the host launches kernels more slowly than the card works them off.

`LOG_EVERY=N`: the loss is read every so many steps (every one, if nothing is said).
`GRAPH=1`: a whole step is captured once and replayed as a CUDA graph.
"""

import os

import torch
from parts import CUDA, DEVICE, GPT, Clock, Profiled, adamw

rows, length, vocab = (8, 256, 4096) if CUDA else (2, 32, 256)
width, layers = (768, 12) if CUDA else (32, 4)
log_every = int(os.environ.get("LOG_EVERY", "1"))

model = GPT(vocabulary=vocab, width=width, layers=layers, length=length, heads=8).to(DEVICE)
model = model.bfloat16() if CUDA else model
optimizer = adamw(model, capturable=CUDA)
ids = torch.randint(0, vocab, (rows, length + 1), device=DEVICE)


def train_step():
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    return loss


def eager():
    loss = train_step()
    optimizer.zero_grad(set_to_none=True)
    return loss


def captured():
    """As torch's notes on CUDA graphs do it: warm up on a side stream, then capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            eager()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = train_step()

    def replay():
        graph.replay()
        return loss

    return replay


step = captured() if os.environ.get("GRAPH") and CUDA else eager
clock, profiled = Clock(), Profiled(host=False)
while clock.running():
    loss = step()
    if len(clock.ends) % log_every == 0:
        value = loss.item()
    clock.step()
    profiled.step()
profiled.close()
clock.close()
print(f"loss {loss.item():.3f}")
