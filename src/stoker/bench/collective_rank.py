"""One rank of the collective benchmark: `collective_rank OPERATIONS SIZES SECONDS BACKEND`, as a module.

A process of its own: the command that asked loads no torch, and does not hang where a fabric does. Rank 0
prints the times as JSON. What a rank receives is compared once with what it must be.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from stoker.world import World

_PATIENCE = timedelta(seconds=60)
_WARM_UPS = 3
_LEAST, _MOST = 3, 1000  # repetitions


def main(operations: list[str], sizes: list[int], seconds: float, backend: str) -> None:
    """`backend` may be empty: NCCL where there are cards, gloo elsewhere."""
    world = World.from_environ()
    device = _device(world, backend)
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as place:
        log = Path(place, "nccl.log")
        if device.type == "cuda" and "NCCL_DEBUG" not in os.environ:
            os.environ.update(
                NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=str(log)
            )  # which transport it takes is there
        _measure(world, device, operations, sizes, seconds, log)


def _measure(
    world: World, device: torch.device, operations: list[str], sizes: list[int], seconds: float, log: Path
) -> None:
    distributed.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=os.environ.get("STOKER_BENCH_MEETING", "env://"),
        rank=world.rank,
        world_size=world.size,
        timeout=_PATIENCE,
    )
    timed: list[dict[str, object]] = []
    refused: list[str] = []
    try:
        _slowest(0.0, device)  # ranks that do not reach each other have nothing to measure
    except RuntimeError as error:
        raise SystemExit(why(str(error))) from None
    for operation in operations:
        try:
            timed += [_timed(operation, size, device, seconds) for size in sizes]
        except (RuntimeError, NotImplementedError) as error:  # gloo lacks some; all ranks alike
            refused.append(f"{operation}: {why(str(error))}")
    if world.rank == 0:
        backend = distributed.get_backend()
        transport = _transport(backend, world.size, log)
        answer = {"timed": timed, "refused": refused, "backend": backend, "transport": transport}
        print(json.dumps(answer), flush=True)
    distributed.destroy_process_group()


def why(text: str) -> str:
    """The line of an error that says something: NCCL's own comes last, after where in torch it was raised."""
    if "Duplicate GPU" in text:
        return "two ranks have the same card, and NCCL wants one for each"
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    after = [lines[at + 1] for at, line in enumerate(lines[:-1]) if line.startswith("Last error")]
    return (after or lines or ["it said nothing"])[0][:160]


def _device(world: World, backend: str) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        if backend == "nccl":
            raise SystemExit("NCCL wants cards, and torch sees none here")
        return torch.device("cpu")
    # A scheduler may show each rank its own card alone: then every one is the first.
    count = torch.cuda.device_count()
    index = world.local_rank if world.local_rank < count else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _transport(backend: str, ranks: int, log: Path) -> str:
    if backend == "gloo":
        return f"TCP on {os.environ.get('GLOO_SOCKET_IFNAME') or 'the interface of the host name'}"
    if ranks == 1:
        return "nothing: one rank leaves its card for nobody"
    try:
        return transports(log.read_text(errors="replace"))
    except OSError:
        return "the transport that NCCL_DEBUG=INFO names"


def transports(log: str) -> str:
    """What the channels of NCCL's log go by: `P2P/CUMEM`, `SHM/direct/direct`, `NET/IB/0/GDRDMA`."""
    found = dict.fromkeys(re.findall(r"Channel \d+.*? via (\S+)", log))
    return ", ".join(found) or "the transport that NCCL_DEBUG=INFO names"


def _timed(operation: str, size: int, device: torch.device, seconds: float) -> dict[str, object]:
    """The mean of as many repetitions as fit, the same number on every rank, of the slowest rank."""
    ranks = distributed.get_world_size()
    each = max(1, size // 4 // ranks)
    call = _prepared(operation, each, ranks, device)
    for _ in range(_WARM_UPS):
        call()
    once = _slowest(_seconds(call, 1, device), device)
    repeats = int(min(_MOST, max(_LEAST, seconds / max(1e-9, once))))
    took = _slowest(_seconds(call, repeats, device), device) / repeats
    return {"operation": operation, "bytes": each * ranks * 4, "seconds": took, "ranks": ranks}


def _prepared(operation: str, each: int, ranks: int, device: torch.device) -> Callable[[], object]:
    """The operation on tensors of its own, after one turn whose outcome was compared."""
    rank = distributed.get_rank()
    whole = torch.full((each * ranks,), float(rank + 1), device=device)
    part = torch.full((each,), float(rank + 1), device=device)
    whole_out, part_out = torch.empty_like(whole), torch.empty_like(part)
    total = ranks * (ranks + 1) / 2
    if operation == "all_reduce":
        once = whole.clone()
        distributed.all_reduce(once)
        _check(operation, once, total)
        zeros = torch.zeros_like(whole)  # sums of zeros stay numbers however often they are added up
        return lambda: distributed.all_reduce(zeros)
    if operation == "all_gather":
        distributed.all_gather_into_tensor(whole_out, part)
        _check(operation, whole_out.view(ranks, each)[:, 0], torch.arange(1.0, ranks + 1, device=device))
        return lambda: distributed.all_gather_into_tensor(whole_out, part)
    if operation == "reduce_scatter":
        distributed.reduce_scatter_tensor(part_out, whole)
        _check(operation, part_out, total)
        return lambda: distributed.reduce_scatter_tensor(part_out, whole)
    if operation == "broadcast":
        distributed.broadcast(whole, src=0)
        _check(operation, whole, 1.0)
        return lambda: distributed.broadcast(whole, src=0)
    distributed.all_to_all_single(whole_out, whole)
    _check(operation, whole_out.view(ranks, each)[:, 0], torch.arange(1.0, ranks + 1, device=device))
    return lambda: distributed.all_to_all_single(whole_out, whole)


def _check(operation: str, got: torch.Tensor, wanted: torch.Tensor | float) -> None:
    if not bool((got == wanted).all()):
        raise SystemExit(f"{operation} gave wrong numbers: the fabric cannot be trusted")


def _seconds(call: Callable[[], object], repeats: int, device: torch.device) -> float:
    distributed.barrier()
    begun = time.monotonic()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.monotonic() - begun


def _slowest(seconds: float, device: torch.device) -> float:
    shared = torch.tensor([seconds], dtype=torch.float64, device=device)
    distributed.all_reduce(shared, op=distributed.ReduceOp.MAX)
    return float(shared)


if __name__ == "__main__":
    main(
        sys.argv[1].split(","), [int(one) for one in sys.argv[2].split(",")], float(sys.argv[3]), sys.argv[4]
    )
