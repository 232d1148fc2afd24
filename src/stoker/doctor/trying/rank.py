"""One rank of the trial of cards: `python -m stoker.doctor.trying.rank FOLDER RANK RANKS`, an answer in JSON.

A process of its own, for the one that asked must not load torch, nor hang where a driver or NCCL does.
"""

from __future__ import annotations

import json
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_COPY_BYTES, _REDUCE_BYTES = 64 << 20, 1 << 20
_COPIES = 4
_PATIENCE = timedelta(seconds=20)


def main(folder: str, rank: int, ranks: int) -> None:
    """Copy to this rank's card, add up with the others, and say how it went."""
    import torch
    from torch import distributed

    on_card = torch.cuda.is_available()
    device = torch.device("cuda", rank) if on_card else torch.device("cpu")
    answer: dict[str, object] = {"rank": rank, "device": str(device), "pin_s": None, "copy_bytes_s": None}
    try:
        if on_card:
            torch.cuda.set_device(device)
            answer["pin_s"], answer["copy_bytes_s"] = _copied(device)
        distributed.init_process_group(
            "nccl" if on_card else "gloo",
            init_method=f"file://{folder}/meeting",
            rank=rank,
            world_size=ranks,
            timeout=_PATIENCE,
        )
        answer["reduce_s"], answer["sum_right"] = _added(device, rank, ranks)
        distributed.destroy_process_group()
    except (RuntimeError, OSError, ValueError) as error:
        answer["error"] = str(error).strip().splitlines()[0][:200]
    print(json.dumps(answer), flush=True)


def _copied(device: torch.device) -> tuple[float, float]:
    """Seconds to pin the buffer; bytes a second to the card, without the first copy."""
    import torch

    begun = time.monotonic()
    pinned = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    pin_s = time.monotonic() - begun
    there = torch.empty_like(pinned, device=device)
    there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    begun = time.monotonic()
    for _ in range(_COPIES):
        there.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    return pin_s, _COPIES * _COPY_BYTES / max(1e-9, time.monotonic() - begun)


def _added(device: torch.device, rank: int, ranks: int) -> tuple[float, bool]:
    """Seconds of the second all-reduce, and whether its sum is right."""
    import torch
    from torch import distributed

    right, taken = True, 0.0
    for turn in range(2):
        numbers = torch.full((_REDUCE_BYTES // 4,), float(rank + turn), device=device)
        begun = time.monotonic()
        distributed.all_reduce(numbers)
        if numbers.is_cuda:
            torch.cuda.synchronize()
        taken = time.monotonic() - begun
        right &= bool((numbers == ranks * (ranks - 1) / 2 + ranks * turn).all())
    return taken, right


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
