"""A language model trained as nanoGPT is: batches are cut out of a mapped file by hand, no DataLoader.

`LOCAL=1`: the rows lie on a local disk; without, on a store that takes its time.
"""

import os
import tempfile
import time

import numpy as np
import torch
from parts import CUDA, DEVICE, GPT, Clock, Profiled, adamw, autocast

batch_size, block_size, vocab = (16, 1024, 8192) if CUDA else (8, 128, 256)
width, layers = (1024, 8) if CUDA else (128, 3)
fetch_s = 0.0 if os.environ.get("LOCAL") else (0.06 if CUDA else 0.04)

path = os.path.join(tempfile.mkdtemp(), "train.bin")
np.random.default_rng(1).integers(0, vocab, 2_000_000).astype(np.uint16).tofile(path)
data = np.memmap(path, dtype=np.uint16, mode="r")


def read_rows(starts, shift):
    if fetch_s:
        time.sleep(fetch_s / 2)  # the store answers
    return torch.stack(
        [torch.from_numpy(data[i + shift : i + shift + block_size].astype(np.int64)) for i in starts]
    )


def get_batch():
    starts = np.random.randint(0, len(data) - block_size - 1, batch_size)
    x, y = read_rows(starts, 0), read_rows(starts, 1)
    if CUDA:
        x, y = x.pin_memory(), y.pin_memory()
    return x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)


model = GPT(vocabulary=vocab, width=width, layers=layers, length=block_size).to(DEVICE)
optimizer = adamw(model)
clock, profiled = Clock(), Profiled()
X, Y = get_batch()
while clock.running():
    with autocast():
        loss = model(X, Y)
    with torch.profiler.record_function("get_batch"):
        X, Y = get_batch()  # while the card computes
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if len(clock.ends) % 10 == 0:
        print(f"step {len(clock.ends)} loss {loss.item():.3f}")
    clock.step()
    profiled.step()
profiled.close()
clock.close()
