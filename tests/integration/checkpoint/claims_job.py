"""Ranks that do not hold what they say, or do not mean the same.

claims_job.py FOLDER SCENE     prints what every rank saw
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from forked import run_ranks
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from stoker.checkpoint.agree import Rounds
from stoker.checkpoint.checkpointer import Checkpointer
from stoker.errors import StokerError
from stoker.world import World

Rounds.slab_bytes = 2048


def said_by(work: Any) -> str:
    try:
        work()
    except StokerError as error:
        return error.message
    return ""


def opened(folder: Path, world: World, **options: Any) -> Checkpointer:
    return Checkpointer(folder / "run", timeout_s=60, world=world, **options)


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run").glob("*/part-*"))


def steps_differ(folder: Path, world: World) -> Any:
    with opened(folder, world) as checkpointer:
        said = said_by(lambda: checkpointer.save(10 - world.rank, state={"w": torch.ones(3)}))
        checkpointer.save(11, state={"w": torch.ones(3)})  # and they go on together
        checkpointer.wait()
        return {"said": said, "step": checkpointer.latest().step}


def objects_differ(folder: Path, world: World) -> Any:
    given = {"state": {"w": torch.ones(3)}} | ({"more": 1} if world.rank else {})
    with opened(folder, world) as checkpointer:
        said = [said_by(lambda: checkpointer.save(1, **given))]
        checkpointer.save(1, state={"w": torch.ones(3)}, more=1)
        checkpointer.wait()
        said.append(said_by(lambda: checkpointer.restore(**given)))
        said.append(said_by(lambda: checkpointer.restore(strict=bool(world.rank), more=1)))
    return {"said": said}


def options_differ(folder: Path, world: World) -> Any:
    with opened(folder, world, keep=world.rank) as checkpointer:
        return {"said": said_by(lambda: checkpointer.save(1, state={"w": torch.ones(3)}))}


def replicas_differ(folder: Path, world: World) -> Any:
    """A DTensor that says it is the same everywhere, and is not."""
    mesh = init_device_mesh("cpu", (world.size,))
    state = {"w": DTensor.from_local(torch.full((40, 40), float(world.rank)), mesh, [Replicate()])}
    with opened(folder, world) as checkpointer:
        said = said_by(lambda: checkpointer.save(1, state=state))
        files = written(folder)
    dist.barrier()
    with Checkpointer(folder / "first", timeout_s=60, world=world, replicas="first") as checkpointer:
        checkpointer.save(1, state=state)
        checkpointer.wait()
        values = checkpointer.load()["state"]["w"].unique().tolist()
    return {"said": said, "files": files, "values": values}


def partial_sums(folder: Path, world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.size,))
    state = {"w": DTensor.from_local(torch.ones(4), mesh, [Partial()])}
    with opened(folder, world) as checkpointer:
        return {"said": said_by(lambda: checkpointer.save(1, state=state)), "files": written(folder)}


def generators_part(folder: Path, world: World) -> Any:
    """Alike at the first save, and no longer at the second."""
    generator, loader = torch.Generator().manual_seed(3), {"seen": 0}
    report = {}
    with opened(folder, world) as checkpointer:
        for step in (1, 2, 3):
            loader = {"seen": step + 10 * world.rank, "generator": generator.get_state()}
            checkpointer.save(step, loader=loader, model=torch.nn.Linear(2, 2, device="cpu"))
            checkpointer.wait()
            names = sorted(
                {piece.box.name for _, piece in checkpointer.latest().pieces() if "loader" in piece.box.name}
            )
            report[step] = names
            torch.rand(3 + world.rank, generator=generator)
        back = {"seen": -1, "generator": torch.zeros_like(loader["generator"])}
        checkpointer.restore(loader=back)
    equal = torch.equal(back["generator"], loader["generator"])
    return {"names": report, "equal": equal, "seen": back["seen"]}


def buffers_part(folder: Path, world: World) -> Any:
    """The running means of DDP's batch norms: each rank has its own, the first one's are those that count."""
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
    torch.manual_seed(world.rank)
    model(torch.randn(8, 4)).sum().backward()
    mine = model.module[1].running_mean.clone()
    with opened(folder, world) as checkpointer:
        checkpointer.save(1, model=model)
        checkpointer.wait()
        model.module[1].running_mean.zero_()
        checkpointer.restore(model=model)
    if world.rank == 0:
        torch.save(mine, folder / "first.pt")
    dist.barrier()
    alone = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    if world.rank == 0:
        with Checkpointer(folder / "run", world=World()) as checkpointer:
            checkpointer.restore(model=alone)
    first = torch.load(folder / "first.pt")
    return {
        "own": torch.equal(model.module[1].running_mean, mine),
        "differs": world.rank == 0 or not torch.equal(mine, first),
        "alone": world.rank > 0 or torch.equal(alone[1].running_mean, first),
    }


def parameters_part(folder: Path, world: World) -> Any:
    """Replicas that drifted, or stages with equal names: the first rank is warned, once."""
    torch.manual_seed(world.rank)
    model = torch.nn.Linear(4, 4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with opened(folder, world) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, model=model)
    return {"said": [str(one.message) for one in seen]}


def trained_apart(folder: Path, world: World) -> Any:
    """As local SGD does: replicas at the first save, each for itself from then on. Rows of one tensor are
    dealt out over the ranks: to go by the first plan would mix them."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(60, 60) for _ in range(40)))
    report = {}
    with opened(folder, world) as checkpointer, warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in (1, 2, 3):
            checkpointer.save(step, model=model)
            checkpointer.wait()
            found = checkpointer.load()["model"]
            report[step] = all(torch.equal(found[name], one) for name, one in model.state_dict().items())
            with torch.no_grad():
                for one in model.parameters():
                    one.add_(1 + world.rank)
    return {"own": report, "said": len(seen)}


def names_clash(folder: Path, world: World) -> Any:
    """A tensor here, a number or a dictionary there."""
    said = []
    for other in (5, {"inner": torch.ones(2)}, {"inner": 5}):
        with opened(folder, world) as checkpointer:
            given = {"x": other if world.rank == 0 else torch.ones(2)}

            def save(given: Any = given, checkpointer: Checkpointer = checkpointer) -> None:
                checkpointer.save(1, state=given)
                checkpointer.wait()

            said.append(said_by(save))
        dist.barrier()
    return {"said": said, "files": written(folder)}


class Broken:
    def state_dict(self) -> Any:
        raise RuntimeError("not now")


def state_fails(folder: Path, world: World) -> Any:
    """On one rank a state_dict raises: the other hears of it at once, and both go on."""
    broken, well = Broken(), {"w": torch.ones(3)}
    with opened(folder, world) as checkpointer:
        try:
            said = said_by(lambda: checkpointer.save(1, thing=broken if world.rank else well))
        except RuntimeError as error:
            said = f"its own: {error}"
        checkpointer.save(2, thing=well)
        checkpointer.wait()
        return {"said": said, "step": checkpointer.latest().step}


def zero(folder: Path, world: World) -> Any:
    """An optimizer that is cut over the ranks; refused, and what the refusal advises."""
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 6)))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    model(torch.ones(6)).sum().backward()
    optimizer.step()
    with opened(folder, world) as checkpointer:
        said = said_by(lambda: checkpointer.save(1, model=model, optimizer=optimizer))
        files = written(folder)
        dist.barrier()
        optimizer.consolidate_state_dict(to=0)
        checkpointer.save(1, model=model, optimizer=optimizer.state_dict() if world.rank == 0 else {})
        slots: dict[str, Any] = {}
        checkpointer.restore(model=model, optimizer=slots)
    wanted = optimizer.state_dict()["state"] if world.rank == 0 else slots["state"]
    equal = [torch.equal(one["exp_avg"], slots["state"][at]["exp_avg"]) for at, one in wanted.items()]
    optimizer.load_state_dict(slots)
    return {"said": said, "files": files, "equal": equal}


def stages(folder: Path, world: World) -> Any:
    """A pipeline whose stages have names of their own: each restores its part, strictly."""

    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = torch.nn.ModuleDict({f"layer{at}": torch.nn.Linear(4, 4) for at in range(4)})
        mine = torch.nn.ModuleDict(
            {name: one for at, (name, one) in enumerate(layers.items()) if at % world.size == world.rank}
        )
        optimizer = torch.optim.AdamW(mine.parameters())
        for parameter in mine.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        return mine, optimizer

    model, optimizer = make(1)
    other, back = make(2)
    with opened(folder, world) as checkpointer:
        checkpointer.save(1, model=model, optimizer=optimizer)
        report = checkpointer.restore(model=other, optimizer=back).report
        gone = said_by(lambda: checkpointer.restore(model=torch.nn.ModuleDict()))
        left = checkpointer.restore(model=torch.nn.ModuleDict(), strict=False).report
    equal = all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    pairs = zip(optimizer.state.values(), back.state.values(), strict=True)
    return {
        "equal": equal and all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in pairs),
        "report": [len(report.restored), len(report.unexpected), len(report.missing)],
        "gone": gone,
        "left": len(left.unexpected),
    }


def parted_stages(folder: Path, world: World) -> Any:
    """Two stages of a pipeline, made with one seed and saved before they were trained: alike by chance. One
    has a layer more; plain ones, and cut over a mesh that is each stage's own."""
    warnings.simplefilter("ignore")
    grid = init_device_mesh("cpu", (2, world.size // 2), mesh_dim_names=("stage", "data"))
    stage = grid.get_local_rank("stage")
    report = {}
    for kind in ("plain", "cut", "frozen"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        if stage:
            model.append(torch.nn.Linear(4, 2))
        if kind == "cut":
            fully_shard(model, mesh=grid["data"])
        seen = []
        with Checkpointer(folder / kind, timeout_s=60, world=world, overlap=kind == "plain") as checkpointer:
            for step in range(1, 5):
                checkpointer.save(step, model=model)
                checkpointer.wait()
                mine = [whole(one).clone() for one in model.parameters()]
                for one in model.parameters():
                    local(one).zero_()
                checkpointer.restore(model=model)
                seen.append(all(map(torch.equal, map(whole, model.parameters()), mine)))
                for one in model.parameters():  # training; the first step of one kind changes nothing
                    local(one).add_(0.0 if kind == "frozen" and step < 2 else 1.0 + stage)
        report[kind] = seen
    return report


def local(one: torch.Tensor) -> torch.Tensor:
    return one.detach().to_local() if isinstance(one, DTensor) else one.detach()


def whole(one: torch.Tensor) -> torch.Tensor:
    return one.detach().full_tensor() if isinstance(one, DTensor) else one.detach()


def fsdp1(folder: Path, world: World) -> Any:
    """In every mode: refused by name, before a byte is written."""
    said, files = [], []
    for at, options in enumerate(({}, {"use_orig_params": True})):
        warnings.simplefilter("ignore")
        model = FullyShardedDataParallel(torch.nn.Linear(6, 6), device_id=torch.device("cpu"), **options)
        optimizer = torch.optim.AdamW(model.parameters())
        for kind in (
            StateDictType.FULL_STATE_DICT,
            StateDictType.SHARDED_STATE_DICT,
            StateDictType.LOCAL_STATE_DICT,
        ):
            FullyShardedDataParallel.set_state_dict_type(model, kind)
            for given in (
                {"model": model, "optimizer": optimizer},
                {"optimizer": optimizer},
                {"model": torch.nn.Sequential(model)},
            ):
                with Checkpointer(folder / "run", timeout_s=60, world=world) as checkpointer:
                    said.append(said_by(lambda given=given, ck=checkpointer: ck.save(at, **given)))  # noqa: B023
                files += written(folder)
                dist.barrier()
    return {"said": said, "files": files}


def fsdp1_by_torch(folder: Path, world: World) -> Any:
    """What the refusal advises: torch gathers the state, and sets it again."""
    warnings.simplefilter("ignore")
    whole = StateDictOptions(full_state_dict=True)

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = FullyShardedDataParallel(
            torch.nn.Linear(6, 7), device_id=torch.device("cpu"), use_orig_params=True
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(6)).sum().backward()
        optimizer.step()
        return model, optimizer

    one, other = made(1), made(2)
    with opened(folder, world) as checkpointer:
        model, optimizer = get_state_dict(*one, options=whole)
        checkpointer.save(1, model=model, optimizer=optimizer)
        model, optimizer = get_state_dict(*other, options=whole)
        checkpointer.restore(model=model, optimizer=optimizer)
        set_state_dict(*other, model_state_dict=model, optim_state_dict=optimizer, options=whole)
    wanted, found = (get_state_dict(*some, options=whole) for some in (one, other))
    slots = [state["state"]["weight"]["exp_avg"] for _, state in (wanted, found)]
    return {"equal": torch.equal(wanted[0]["weight"], found[0]["weight"]) and torch.equal(*slots)}


ALL = (steps_differ, objects_differ, options_differ, replicas_differ, partial_sums)
ALL += (trained_apart, names_clash, state_fails, zero)
ALL += (generators_part, buffers_part, parameters_part, stages, parted_stages, fsdp1, fsdp1_by_torch)
SCENES = {one.__name__: one for one in ALL}


def main() -> None:
    for scene in sys.argv[2:]:
        folder = Path(sys.argv[1]) / scene
        folder.mkdir(parents=True)

        def act(world: World, folder: Path = folder, scene: str = scene) -> None:
            report = SCENES[scene](folder, world)
            (folder / f"rank-{world.rank}.json").write_text(json.dumps(report))

        codes = run_ranks(4 if scene == "parted_stages" else 2, act, store=f"{folder}/store")
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        print("SCENE", json.dumps({"scene": scene, "codes": codes, "ranks": ranks}), flush=True)


if __name__ == "__main__":
    main()
