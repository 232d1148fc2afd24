"""Ranks that each hold a shard of one tensor: saved to a store, or restored from it into an empty folder.

requests_job.py FOLDER count|apart REMOTE LOG RANKS...     prints how many requests each restore took
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from forked import run_ranks
from s3_server import free_ports
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.world import World


def main() -> None:
    folder, scene, remote, log = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    if scene == "apart":
        run(folder, apart, 2, remote)
        return
    counts = {}
    for ranks in map(int, sys.argv[5:]):
        run(folder / f"{ranks}-save", act, ranks, f"{remote}/{ranks}")
        before = log.stat().st_size
        run(folder / f"{ranks}-restore", act, ranks, f"{remote}/{ranks}")
        counts[ranks] = log.read_text()[before:].count("\n")
    print(json.dumps(counts))


def run(folder: Path, work: Callable[..., None], ranks: int, remote: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    port = free_ports(1)[0]
    codes = run_ranks(ranks, lambda world: work(folder, world, remote, port), store=str(folder / "store"))
    assert codes == [0] * ranks


def sharded(value: float, world: World) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world.size,))
    return {"w": distribute_tensor(torch.full((world.size * 8, 64), value), mesh, [Shard(0)])}


def act(folder: Path, world: World, remote: str, port: int) -> None:
    """Save, or restore what was saved into an empty folder."""
    with Checkpointer(folder / "run", remote=remote, world=world) as checkpointer:
        if folder.name.endswith("save"):
            checkpointer.save(1, state=sharded(1, world))
            return
        back = sharded(0, world)
        assert checkpointer.restore(state=back).step == 1
        assert bool((back["w"].to_local() == 1).all())


def apart(folder: Path, world: World, remote: str, port: int) -> None:
    """Nodes with disks of their own, and no remote tier."""
    world = replace(world, local_rank=0, local_size=1, node=world.rank, nodes=world.size)
    options = {"board": f"127.0.0.1:{port}", "world": world}
    with Checkpointer(folder / f"node-{world.rank}", **options) as checkpointer:
        checkpointer.save(1, state=sharded(1, world))


if __name__ == "__main__":
    main()
