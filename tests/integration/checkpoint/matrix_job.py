"""Other people's parallelisms: what is saved is what the ranks hold, however and when it is saved and on
however many ranks it comes back. The truth is gathered by torch alone.

matrix_job.py FOLDER KIND-MOMENT-SIZE-SIZE...     saves with as many ranks as the first size says, restores
with each of the others; prints what every restore found
"""

from __future__ import annotations

import json
import sys
import warnings
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from stoker.checkpoint.agree import Rounds
from stoker.checkpoint.checkpointer import Checkpointer
from stoker.errors import StokerError
from stoker.world import World

WHOLE = StateDictOptions(full_state_dict=True)
Rounds.slab_bytes = 2048  # the embedding, the layers and their state are larger, norms and biases smaller


class Net(torch.nn.Module):
    """Tied weights, another dtype, a layer that is not contiguous, buffers of several dtypes."""

    def __init__(self, hidden: int, *, transposed: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(37, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.up, self.down = torch.nn.Linear(16, hidden), torch.nn.Linear(hidden, 16)
        self.low = torch.nn.Linear(16, 16, dtype=torch.bfloat16)
        self.odd = torch.nn.Linear(16, 16)
        if transposed:
            self.odd.weight = torch.nn.Parameter(torch.randn(16, 16).t())
        self.head = torch.nn.Linear(16, 37, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scale", torch.rand(3, dtype=torch.float64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        x = x + self.low(x.bfloat16()).float() + self.odd(x)
        return self.head(x)


class Experts(torch.nn.Module):
    """A router that all ranks hold, experts that are one rank's own, under names of their own, and a stack of
    experts that is cut over the ranks."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.router = torch.nn.Linear(16, 7)
        self.experts = torch.nn.ModuleDict()
        for at in range(7):
            expert = torch.nn.Linear(16, 33)
            if at % size == rank:
                self.experts[str(at)] = expert
        stack = torch.randn(5, 16, 33)
        self.stack = torch.nn.Parameter(
            distribute_tensor(stack, init_device_mesh("cpu", (size,)), [Shard(0)])
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.router.weight.sum() * tokens.float().mean()
        return (
            x + sum(one(torch.ones(16)).sum() for one in self.experts.values()) + self.stack.to_local().sum()
        )


def make(kind: str, world: World, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed + (100 * world.rank if kind == "stages" else 0))
    if kind == "experts":
        return Experts(world.rank, world.size)
    hidden = 36 if "tp" in kind else 33
    model: torch.nn.Module = Net(hidden, transposed=kind in ("ddp", "stages"))
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp1":
        return fsdp1(model)
    if kind == "stages":
        return model
    mesh = mesh_of(kind, world.size)
    if "tp" in kind:
        tensor_parallel(model, mesh["tp"] if kind != "tp" else mesh)
    if kind != "tp":
        over = mesh["dp"] if kind == "fsdp2tp" else mesh
        for layer in (model.low, model.up, model):  # one dtype in each group
            fully_shard(layer, mesh=over)
    return model


def fsdp1(model: torch.nn.Module) -> torch.nn.Module:
    """One dtype in each flat parameter; as torch gathers it, since a Checkpointer refuses it by name."""
    for name in ("low", "up"):
        setattr(model, name, flat_sharded(getattr(model, name)))
    return flat_sharded(model)


def flat_sharded(module: torch.nn.Module) -> torch.nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


def given_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a program gives to a Checkpointer."""
    if not isinstance(model, FullyShardedDataParallel):
        return {"model": model, "optimizer": optimizer}
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=WHOLE), strict=True))


def mesh_of(kind: str, size: int) -> Any:
    if kind == "fsdp2tp":
        tp = 2 if size % 2 == 0 else 1
        return init_device_mesh("cpu", (size // tp, tp), mesh_dim_names=("dp", "tp"))
    if kind == "hsdp":
        replicas = 2 if size % 2 == 0 else 1
        return init_device_mesh("cpu", (replicas, size // replicas), mesh_dim_names=("rep", "shard"))
    return init_device_mesh("cpu", (size,))


def tensor_parallel(model: torch.nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for layer in (model.norm, model.odd):  # replicated, as DTensors
        distribute_module(
            layer,
            mesh,
            input_fn=lambda _, given, mesh: DTensor.from_local(
                given[0], mesh, [Replicate()], run_check=False
            ),
            output_fn=lambda _, out, mesh: out.to_local(),
        )


def other_state(world: World) -> dict[str, Any]:
    """Tensors of other people's making: cut and replicated unevenly, transposed, of odd dtypes."""
    size, whole = world.size, torch.arange(7 * 90, dtype=torch.float32).view(7, 90)
    mesh = init_device_mesh("cpu", (size,))
    flat = init_device_mesh("cpu", (2, size // 2) if size % 2 == 0 else (1, size))
    return {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole + 1, mesh, [Shard(1)]),
        "alike": distribute_tensor(whole + 2, mesh, [Replicate()]),
        "some": distribute_tensor(whole + 3, flat, [Replicate(), Shard(0)]),
        "grid": distribute_tensor(whole + 4, flat, [Shard(1), Shard(0)]),
        "twice": distribute_tensor(whole + 5, flat, [Shard(0), Shard(0)]),
        "transposed": (whole + 6).t(),
        "view": (whole + 7)[1:6, 3:80],
        "half": whole.bfloat16(),
        "byte": torch.arange(200, dtype=torch.uint8),
        "empty": torch.empty(0, 3),
    }


# --- training -------------------------------------------------------------------------------------


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, *, steps: int = 2) -> None:
    for step in range(steps):
        loss(model, step).backward()
        if isinstance(model, Experts):  # what all hold gets the gradients of all
            for parameter in model.router.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()


def trained_whole(seed: int, more: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net(33, transposed=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    for _ in range(more):
        train(model, optimizer, steps=1)
    return model, optimizer


def loss(model: torch.nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randint(0, 37, (4, 5), generator=generator)).float().pow(2).mean()


@contextmanager
def at_moment(moment: str, model: torch.nn.Module):
    """The loop as it is when it saves; afterwards it goes on."""
    if moment == "evaluation":
        model.eval()
        with torch.no_grad():
            loss(model, 5)
        sharded = isinstance(model, (FSDPModule, FullyShardedDataParallel))
        with torch.no_grad() if sharded else torch.inference_mode():
            loss(model, 6)
        model.train()
    if moment == "accumulation":
        accumulates(model, True)
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            loss(model, 5).backward()
    yield
    if moment == "accumulation":
        accumulates(model, False)
        loss(model, 6).backward()


def accumulates(model: torch.nn.Module, on: bool) -> None:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(not on)
        model.set_reshard_after_backward(not on)


def truth_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, other: dict[str, Any]
) -> dict[str, Any]:
    """Everything, whole; gathered by torch."""
    if isinstance(model, FullyShardedDataParallel):
        return gathered(model, optimizer) | {f"other.{name}": full(one) for name, one in other.items()}
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    found = {f"model.{name}": full(one) for name, one in bare.state_dict().items()}
    names = {id(one): name for name, one in bare.named_parameters()}
    for parameter, slots in optimizer.state.items():
        found.update({f"{names[id(parameter)]}/{slot}": full(one) for slot, one in slots.items()})
    return found | {f"other.{name}": full(one) for name, one in other.items()}


def gathered(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Of FSDP1, by `get_state_dict`: `full_optim_state_dict` gives exp_avg_sq for exp_avg on CPUs."""
    weights, slots = get_state_dict(model, optimizer, options=WHOLE)
    found = {f"model.{name}": full(one) for name, one in weights.items()}
    named = slots["state"].items()
    return found | {f"{name}/{slot}": full(one) for name, some in named for slot, one in some.items()}


def full(value: torch.Tensor) -> torch.Tensor:
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone()


# --- the cases ------------------------------------------------------------------------------------


def save(folder: Path, kind: str, moment: str, world: World) -> None:
    model = make(kind, world, seed=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    other, own = other_state(world), {"t": torch.full((9,), world.rank), "n": world.rank}
    with Checkpointer(folder / "run", timeout_s=60, world=world, overlap=moment == "behind") as checkpointer:
        for step in (1, 2) if moment == "behind" else ():  # the first proves that the others may overlap
            checkpointer.save(step, **given_of(model, optimizer), other=other, own=own)
            train(model, optimizer, steps=1)
        truth = truth_of(model, optimizer, other)
        with at_moment(moment, model):
            checkpointer.save(3, **given_of(model, optimizer), other=other, own=own)
        if moment == "behind":
            train(model, optimizer, steps=1)
        checkpointer.wait()
    if kind == "fsdp1":  # the truth is that of a model that nobody cut
        truth = truth_of(*trained_whole(seed=5, more=2 if moment == "behind" else 0), other)
    torch.save(truth, folder / f"truth-{world.rank}.pt")


def check(folder: Path, kind: str, before: int, world: World) -> None:
    model = make(kind, world, seed=77)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if world.size % 2:
        train(model, optimizer, steps=1)  # into state that is there, or that is not
    other = {name: one * 0 for name, one in other_state(world).items()}
    own = {"own": {"t": torch.zeros(9, dtype=torch.int64), "n": -1}} if world.size == before else {}
    report: dict[str, Any] = {"said": ""}
    with Checkpointer(folder / "run", timeout_s=60, world=world) as checkpointer:
        try:
            given = given_of(model, optimizer)
            restored = checkpointer.restore(**given, other=other, **own)
            if kind == "fsdp1":
                states = {"model_state_dict": given["model"], "optim_state_dict": given["optimizer"]}
                set_state_dict(model, optimizer, **states, options=WHOLE)
        except StokerError as error:
            report["said"] = error.message
        else:
            wanted = wanted_here(folder, kind, before, world)
            found = truth_of(model, optimizer, other)
            report["wrong"] = sorted(name for name in found if not same(wanted.get(name), found[name]))
            report["count"], report["report"] = len(found), str(restored.report)
            if own:
                report["own"] = [own["own"]["n"], own["own"]["t"].tolist() == [world.rank] * 9]
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(report))


def wanted_here(folder: Path, kind: str, before: int, world: World) -> dict[str, Any]:
    """What all ranks hold together; of stages with equal names what this one held."""
    ranks = [world.rank] if kind == "stages" else range(before)
    found: dict[str, Any] = {}
    for rank in ranks:
        found |= torch.load(folder / f"truth-{rank}.pt")
    return found


def same(one: torch.Tensor | None, other: torch.Tensor) -> bool:
    return one is not None and one.dtype == other.dtype and torch.equal(one, other)


def run_case(folder: Path, kind: str, moment: str, before: int, *sizes: int) -> list[dict[str, Any]]:
    folder.mkdir(parents=True)
    codes = run_ranks(before, lambda world: save(folder, kind, moment, world), store=f"{folder}/store-a")
    reports: list[dict[str, Any]] = [{"codes": codes}]
    for size in sizes if not any(codes) else ():
        for path in folder.glob("rank-*.json"):
            path.unlink()
        codes = run_ranks(
            size, lambda world: check(folder, kind, before, world), store=f"{folder}/store-{size}"
        )
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        reports.append({"size": size, "codes": codes, "ranks": ranks})
    return reports


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # FSDP1's own, of itself
    for case in sys.argv[2:]:
        kind, moment, *sizes = case.split("-")
        reports = run_case(Path(sys.argv[1]) / case, kind, moment, *map(int, sizes))
        print("MATRIX", json.dumps({"case": case, "runs": reports}), flush=True)


if __name__ == "__main__":
    main()
