"""A transformer whose blocks scale their activations by the largest, as its author wrote it: by .item().

`ON_CARD=1`: the largest stays on the card, and nothing is read back.
"""

import os

import torch
from parts import CUDA, DEVICE, GPT, Clock, Profiled, adamw, autocast
from torch import nn
from torch.nn import functional as F

rows, length, vocab = (16, 512, 8192) if CUDA else (2, 32, 256)
width, layers = (1024, 24) if CUDA else (64, 2)
on_card = bool(os.environ.get("ON_CARD"))


def largest(x):
    found = x.detach().abs().amax().clamp(min=1.0)
    return found if on_card else found.item()


def rms_norm(x, weight):
    x = x.float()
    return (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(weight.dtype) * weight


class Scaled(nn.Module):
    """Small operations by hand, and a scale for each half."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        rows, length, width = x.shape
        x = x / largest(x)
        y = rms_norm(x, self.first)
        q, k, v = (
            one(y).view(rows, length, self.heads, -1).transpose(1, 2) for one in (self.q, self.k, self.v)
        )
        q, k = q / largest(q), k / largest(k)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        y = rms_norm(x, self.second)
        y = F.silu(self.gate(y)) * self.up(y)
        return x + self.down(y / largest(y))


model = GPT(vocabulary=vocab, width=width, layers=layers, length=length, block=Scaled).to(DEVICE)
optimizer = adamw(model)
clock, profiled = Clock(), Profiled()
ids = torch.randint(0, vocab, (rows, length + 1), device=DEVICE)
while clock.running():
    with autocast():
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
