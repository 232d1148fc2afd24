"""What these programs share: a GPT, the times of its steps, a profiler. Nothing here knows of stoker.

`SECONDS` is how long to train, `TIMES` the file for the ends of the steps, `PROFILE` one for a trace.
"""

import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SECONDS = float(os.environ.get("SECONDS", "8"))
if not CUDA:
    torch.set_num_threads(1)


class Clock:
    """When each step ended; the last one when the card had done all of it."""

    def __init__(self):
        self.ends = []
        self.begun = time.perf_counter()

    def step(self):
        self.ends.append(time.perf_counter())

    def running(self):
        return not self.ends or self.ends[-1] - self.ends[0] < SECONDS

    def close(self):
        if CUDA:
            torch.cuda.synchronize()
            if self.ends:
                self.ends[-1] = time.perf_counter()
        if "TIMES" in os.environ:
            part = Path(os.environ["TIMES"] + ".part")
            part.write_text(json.dumps(self.ends))
            part.replace(os.environ["TIMES"])


class Profiled:
    """Ten steps under torch's profiler, exported as its tutorial does, where a file is asked for. On a card
    each of them may take twice its time: those before are few, so that all ten fit into three seconds."""

    def __init__(self, *, host=True):
        self.path = os.environ.get("PROFILE")
        self.profiler = None
        if self.path:
            kinds = torch.profiler.ProfilerActivity
            asked = ([kinds.CPU] if host or not CUDA else []) + ([kinds.CUDA] if CUDA else [])
            self.profiler = torch.profiler.profile(
                activities=asked,
                schedule=torch.profiler.schedule(wait=7, warmup=5, active=11, repeat=1),
                on_trace_ready=lambda done: done.export_chrome_trace(self.path),
            )
            self.profiler.start()

    def step(self):
        if self.profiler:
            self.profiler.step()

    def close(self):
        if self.profiler:
            self.profiler.stop()


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    def __init__(self, *, vocabulary, width, layers, length, heads=16, block=Block):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids, targets):
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def adamw(model, **options):
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=CUDA, **options)


def autocast():
    return torch.autocast(DEVICE, torch.bfloat16, enabled=CUDA)
