"""Trains sharded and replicated models on some ranks and restores them on others; says what came back.

reshard_job.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from forked import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.world import World

CASES = [("fsdp", 2, 1), ("fsdp", 2, 4), ("fsdp", 4, 2), ("columns", 2, 4), ("ddp", 2, 4), ("ddp", 4, 1)]


def make(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        by_columns = {"shard_placement_fn": _last_dim} if kind == "columns" else {}
        fully_shard(model, mesh=mesh, **by_columns)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _last_dim(parameter: torch.nn.Parameter):
    from torch.distributed.tensor import Shard

    columns = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return Shard(1) if columns else Shard(0)


def state_of(model, optimizer) -> dict[str, torch.Tensor]:
    """Everything, whole, on every rank."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: full(one) for name, one in bare.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        found.update({f"{number}.{slot}": full(one) for slot, one in slots.items()})
    return found


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


def save(folder: Path, kind: str, world: World) -> None:
    model, optimizer = make(kind)
    with Checkpointer(folder / "run", every=2, timeout_s=30, world=world) as checkpointer:
        for step in range(1, 5):
            torch.manual_seed(step)
            model(torch.randn(8, 8)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            checkpointer.step(step, model=model, optimizer=optimizer, note="hello")
    state = state_of(model, optimizer)
    if world.rank == 0:
        torch.save(state, folder / "wanted.pt")


def check(folder: Path, kind: str, world: World) -> None:
    model, optimizer = make(kind)
    with Checkpointer(folder / "run", timeout_s=30, world=world) as checkpointer:
        restored = checkpointer.restore(model=model, optimizer=optimizer)
        size = checkpointer.latest().manifest.bytes
    wanted, found = torch.load(folder / "wanted.pt"), state_of(model, optimizer)
    equal = wanted.keys() == found.keys() and all(torch.equal(wanted[k], found[k]) for k in wanted)
    report = {"equal": equal, "step": restored.step, "extras": restored.extras, "bytes": size}
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(report))


def main() -> None:
    reports = []
    for kind, before, after in CASES:
        folder = Path(sys.argv[1]) / f"{kind}-{before}-{after}"
        folder.mkdir(parents=True)
        codes = run_ranks(before, lambda world: save(folder, kind, world), store=f"{folder}/store-a")  # noqa: B023
        codes += run_ranks(after, lambda world: check(folder, kind, world), store=f"{folder}/store-b")  # noqa: B023
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        reports.append({"case": [kind, before, after], "codes": codes, "ranks": ranks})
    print(json.dumps(reports))


if __name__ == "__main__":
    main()
