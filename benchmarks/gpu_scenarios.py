"""A GPT that trains on one GPU with one fault: what `gpu_watch.py` runs through `stoker watch`.

It knows nothing of stoker, as a stranger's script would. The faults are those of the labelled recordings.

    python benchmarks/gpu_scenarios.py starved_steady --seconds 15
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

VOCABULARY, WIDTH, LAYERS, LENGTH, ROWS = 32_768, 1024, 12, 1024, 16
HANG_S = 20.0  # a spinning kernel is given up after that, so that nobody has to kill it


class Tokens(IterableDataset):
    """Random tokens in whole batches, late in one way or another."""

    def __init__(self, fault: str) -> None:
        self._fault = fault

    def __iter__(self):
        batch = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1))
        number = 0
        while True:
            number += 1
            if self._fault == "starved_steady":
                time.sleep(0.12)
            elif self._fault == "starved_burst" and number % 25 == 0:
                time.sleep(2.0)
            elif self._fault == "starved_cpu":
                end = time.perf_counter() + 0.12
                while time.perf_counter() < end:
                    sum(range(1000))
            yield batch


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.before(x)).view(rows, length, 3, 16, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.after(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]]))


class Tiny(nn.Module):
    """Hundreds of kernels that do next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(300)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.layers(ids[:, :32].float())


def train(fault: str, seconds: float, folder: Path) -> list[float]:
    """Seconds of each step."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = fault != "fp32_no_tf32"
    model = (Tiny() if fault == "tiny_kernels" else GPT()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fault != "tiny_kernels")
    bulk = bulky(fault)
    kept: list[torch.Tensor] = []
    steps, begin = [], time.perf_counter()
    last = begin
    for number, batch in enumerate(DataLoader(Tokens(fault), batch_size=None, num_workers=0), start=1):
        ids = batch.cuda(non_blocking=True)
        if bulk is not None:
            moved = bulk.to("cuda", non_blocking=bulk.is_pinned())
            ids = (ids + moved.view(-1)[: ids.numel()].view_as(ids).long() * 0).contiguous()
        loss = forward(model, ids, fault)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if fault == "memory_pressure":
            torch.cuda.empty_cache()
            if number == 3:
                kept.append(fill_card())
        if fault == "checkpoint_sync" and number % 20 == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "last.pt")
            os.sync()
        if fault == "hang_spin" and number == 40:
            hang()
        loss.item()
        now = time.perf_counter()
        steps.append(now - last)
        last = now
        if now - begin > seconds:
            break
    return steps


def forward(model: nn.Module, ids: torch.Tensor, fault: str) -> torch.Tensor:
    if fault == "tiny_kernels":
        return model(ids).square().mean()
    with torch.autocast("cuda", torch.bfloat16, enabled=fault != "fp32_no_tf32"):
        logits = model(ids[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def bulky(fault: str) -> torch.Tensor | None:
    """805 MB that travel with each batch."""
    if not fault.startswith("h2d_"):
        return None
    return torch.zeros(201 << 20, dtype=torch.float32, pin_memory=fault == "h2d_pinned")


def fill_card() -> torch.Tensor:
    """Leave what a step needs beside the weights, and a little."""
    free, _ = torch.cuda.mem_get_info()
    step = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
    return torch.empty(max(0, free - step - (2 << 30)), dtype=torch.uint8, device="cuda")


def hang() -> None:
    threading.Timer(HANG_S, os._exit, (1,)).start()
    for _ in range(100):
        torch.cuda._sleep(4_000_000_000)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("fault")
    parser.add_argument("--seconds", type=float, default=15)
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--steps", type=Path, help="write the seconds of each step here")
    given = parser.parse_args()
    steps = train(given.fault, given.seconds, given.folder)
    if given.steps:
        given.steps.write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
