"""One rank of a job under torchrun: trains a little sharded model, or restores it and says what it got.

reshard_job.py ROOT OUT KIND(fsdp|ddp) save|check
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import stoker


def make(kind: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 5))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def full(value):
    value = value.full_tensor() if hasattr(value, "full_tensor") else value
    return value.detach().clone()


def state_of(model, optimizer):
    """Everything, whole, on every rank."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: full(one) for name, one in bare.state_dict().items()}
    for number, slots in optimizer.state_dict()["state"].items():
        found.update({f"{number}.{slot}": full(one) for slot, one in slots.items()})
    return found


def main() -> None:
    root, out, kind, verb = sys.argv[1:5]
    dist.init_process_group("gloo")
    model, optimizer = make(kind)
    with stoker.Checkpointer(root, every=2, timeout_s=30) as checkpointer:
        if verb == "save":
            for step in range(1, 5):
                torch.manual_seed(step)  # the same data on every rank: the result must not depend on them
                model(torch.randn(8, 7)).pow(2).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                checkpointer.step(step, model=model, optimizer=optimizer, note="hello")
            state = state_of(model, optimizer)
            if dist.get_rank() == 0:
                torch.save(state, out)
        else:
            restored = checkpointer.restore(model=model, optimizer=optimizer)
            wanted, found = torch.load(out), state_of(model, optimizer)
            equal = wanted.keys() == found.keys() and all(torch.equal(wanted[k], found[k]) for k in wanted)
            if dist.get_rank() == 0:
                print(json.dumps({"equal": equal, "step": restored.step, "extras": restored.extras}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
