"""A GPT that saves everything in its loop, every so many steps.

`SAVE_EVERY=N`: 0 never saves.
"""

import os
import tempfile

import torch
from parts import CUDA, DEVICE, GPT, Clock, Profiled, adamw, autocast

rows, length, vocab = (16, 1024, 8192) if CUDA else (2, 64, 2048)
width, layers = (768, 8) if CUDA else (256, 3)
save_every = int(os.environ.get("SAVE_EVERY", "60" if CUDA else "8"))
path = os.path.join(tempfile.mkdtemp(), "checkpoint.pt")

model = GPT(vocabulary=vocab, width=width, layers=layers, length=length, heads=8).to(DEVICE)
optimizer = adamw(model)
ids = torch.randint(0, vocab, (rows, length + 1), device=DEVICE)
clock, profiled = Clock(), Profiled()
while clock.running() or (save_every and len(clock.ends) % save_every != save_every // 2):
    with autocast():
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    number = len(clock.ends) + 1
    if number % 20 == 0:
        print(f"step {number} loss {loss.item():.3f}")
    if save_every and number % save_every == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    clock.step()
    profiled.step()
profiled.close()
clock.close()
os.unlink(path) if os.path.exists(path) else None
