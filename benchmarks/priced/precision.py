"""A GPT in fp32, as torch multiplies by default.

`TF32=1`: torch.set_float32_matmul_precision("high").
"""

import os

import torch
from parts import CUDA, DEVICE, GPT, Clock, Profiled, adamw

if os.environ.get("TF32"):
    torch.set_float32_matmul_precision("high")
rows, length, vocab = (8, 1024, 8192) if CUDA else (2, 32, 256)
width, layers = (1024, 8) if CUDA else (64, 2)

model = GPT(vocabulary=vocab, width=width, layers=layers, length=length).to(DEVICE)
optimizer = adamw(model)
ids = torch.randint(0, vocab, (rows, length + 1), device=DEVICE)
clock, profiled = Clock(), Profiled()
while clock.running():
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if len(clock.ends) % 20 == 0:
        print(f"step {len(clock.ends)} loss {loss.item():.3f}")
    clock.step()
    profiled.step()
profiled.close()
clock.close()
