"""Scenes with several ranks: nodes without a shared folder, a rank that dies or fails, a slow writer.

ranks_job.py FOLDER SCENE     prints what every rank saw
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from forked import run_ranks
from s3_server import free_ports

from stoker.checkpoint.checkpointer import Checkpointer
from stoker.checkpoint.saved.commit import OWNER, begin, this_owner
from stoker.checkpoint.saved.reader import Checkpoint
from stoker.checkpoint.saved.upload import Upload
from stoker.checkpoint.storm import Limits
from stoker.errors import CheckpointError, StokerError
from stoker.world import World


def state(value: float) -> dict[str, torch.Tensor]:
    return {f"w{at}": torch.full((3000,), value) for at in range(4)}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("0"))


def unfinished(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".saving")]


def two_nodes(folder: Path, world: World) -> Any:
    """Each node has a disk of its own, with what a killed run left; the remote tier is all they share."""
    world = replace(world, local_rank=0, local_size=1, node=world.rank, nodes=2)
    root = folder / f"node-{world.rank}"
    killed = begin(root, step=7, sequence=7).folder(root)
    (killed / OWNER).write_text(json.dumps(this_owner() | {"started": "before"}))
    options = {"remote": str(folder / "remote"), "board": f"127.0.0.1:{PORTS[0]}", "world": world}
    with Checkpointer(root, keep=2, timeout_s=20, chunk_bytes=4096, **options) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state=state(step))
            checkpointer.wait()
    files = sorted(path.name for path in (root / names(root)[-1]).iterdir())
    back = state(0)
    options["board"] = f"127.0.0.1:{PORTS[1]}"
    with Checkpointer(root, timeout_s=20, **options) as checkpointer:
        restored = checkpointer.restore(state=back)
    return {
        "files": files,
        "kept": len(names(root)),
        "left": unfinished(root),
        "step": restored.step,
        "equal": all(bool((one == 3).all()) for one in back.values()),
        "remote": len(names(folder / "remote")),
    }


def a_rank_dies(folder: Path, world: World) -> Any:
    slow = Limits(write_bytes_per_s=20_000)  # both are still writing when one of them goes
    checkpointer = Checkpointer(folder / "run", timeout_s=600, chunk_bytes=4096, limits=slow, world=world)
    checkpointer.save(1, state=state(1))
    checkpointer.wait()
    if world.rank == 1:
        checkpointer.save(2, state=state(2), wait={"for": "ever"})
        while not [*(folder / "run").glob(".saving-*/part-00001.bin")]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.save(2, state=state(2), wait={"for": "ever"})
    said = ""
    try:
        checkpointer.wait()
    except StokerError as error:
        said = error.message
    KEPT.append(checkpointer)  # how a job without one of its ranks ends is not what this is about
    back = state(0)
    with Checkpointer(folder / "run", world=World()) as alone:
        step = alone.restore(state=back).step
    return {"said": said, "step": step, "w": float(back["w0"][0]), "left": unfinished(folder / "run")}


def the_run_after(folder: Path, world: World) -> Any:
    """The next run in the folder of `a_rank_dies`: its first save takes away what the dead rank left."""
    root = folder.parent / "a_rank_dies" / "run"
    with Checkpointer(root, world=world) as checkpointer:
        checkpointer.save(3, state=state(3))
    return {"left": unfinished(root), "kept": len(names(root))}


def a_rank_fails(folder: Path, world: World, failing: int = 1) -> Any:
    checkpointer = Checkpointer(folder / "run", timeout_s=20, world=world)
    checkpointer.save(1, state=state(1))
    checkpointer.wait()
    said = []
    try:
        bad = {"extra": object()} if world.rank == failing else {"extra": 1}
        checkpointer.save(2, state=state(2), **bad)
        checkpointer.wait()
    except StokerError as error:
        said.append(error.message)
    checkpointer.save(3, state=state(3))  # and all go on together
    checkpointer.wait()
    step = checkpointer.latest().step
    checkpointer.close()
    return {"said": said, "step": step}


def a_rank_fails_and_goes(folder: Path, world: World) -> Any:
    """Its error ends the loop of one rank: the other hears of it at its next step, and does not wait."""
    checkpointer = Checkpointer(folder / "run", every=1, timeout_s=20, world=world)
    said = ""
    try:
        for step in (1, 2):
            checkpointer.step(step, state=state(step), extra=object() if world.rank else 1)
    except StokerError as error:
        said = error.message
    checkpointer.close()
    return {"said": said}


def the_first_rank_fails(folder: Path, world: World) -> Any:
    return a_rank_fails(folder, world, failing=0)


def a_restore_fails(folder: Path, world: World) -> Any:
    """One rank's model is another than the one that was saved: no rank may go on."""
    checkpointer = Checkpointer(folder / "run", timeout_s=20, world=world)
    checkpointer.save(1, model=torch.nn.Linear(3, 3))
    said = ""
    try:
        checkpointer.restore(model=torch.nn.Linear(3, 3 + world.rank))
    except StokerError as error:
        said = error.message
    checkpointer.close()
    return {"said": said}


def skips(folder: Path, world: World) -> Any:
    """Only rank 0 is slow, and all ranks skip alike."""
    slow = Limits(write_bytes_per_s=10_000 if world.rank == 0 else 0)
    checkpointer = Checkpointer(
        folder / "run", every=1, when_busy="skip", timeout_s=20, chunk_bytes=4096, limits=slow, world=world
    )
    begun = [checkpointer.step(step, state=state(step)) for step in range(1, 4)]
    checkpointer.wait()
    begun.append(checkpointer.step(4, state=state(4)))
    checkpointer.close()
    return {"begun": begun, "skipped": checkpointer.report().skipped}


def turns(folder: Path, world: World) -> Any:
    """One writer at a time, in the whole job and on a node."""
    limits = Limits(node_writers=1, job_writers=1, stagger_s=0.01)
    with Checkpointer(folder / "run", timeout_s=20, limits=limits, world=world) as checkpointer:
        checkpointer.save(1, state=state(1))
    parts = sorted((folder / "run").glob("0*/part-*.bin"))  # two may be of one tick of the kernel's clock
    return {"order": [path.name for path in sorted(parts, key=lambda path: path.stat().st_mtime_ns)]}


def a_rank_leaves(folder: Path, world: World) -> Any:
    """Rank 0 hangs in its loop, as in a collective, until the other has left: that one must not wait."""
    checkpointer = Checkpointer(folder / "run", remote=str(folder / "far"), timeout_s=20, world=world)
    checkpointer.save(1, state=state(1))
    checkpointer.wait()
    deadline = time.monotonic() + 20
    while world.rank == 0 and not (folder / "rank-1.json").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    left = world.rank == 1 or (folder / "rank-1.json").exists()
    checkpointer.close()
    return {"left": left, "drained": checkpointer.report().drained}


def until(check: Callable[[], Any]) -> Any:
    """What it gives, once that is something; nothing after half a minute."""
    deadline = time.monotonic() + 30
    while not (found := check()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def a_drain_fails(folder: Path, world: World) -> Any:
    """Nodes with disks of their own: rank 0 cannot bring the manifest for a while. All hear the same of it,
    and it is brought without another save."""
    world = replace(world, local_rank=0, local_size=1, node=world.rank, nodes=2)
    real = Upload.finish

    def fails(upload: Upload) -> None:
        if not (folder / "over").exists():
            raise CheckpointError("the manifest cannot be brought")
        real(upload)

    def said() -> str:
        try:
            checkpointer.wait()
        except StokerError as error:
            return error.message
        return ""

    Upload.finish = fails  # type: ignore[method-assign]
    options = {"remote": str(folder / "far"), "board": f"127.0.0.1:{PORTS[2]}", "world": world}
    options |= {"timeout_s": 1, "on_drain_failure": "raise"}
    checkpointer = Checkpointer(folder / f"node-{world.rank}", **options)
    checkpointer.save(1, state=state(1))
    heard = until(said)
    (folder / f"heard-{world.rank}").touch()
    until(lambda: len([*folder.glob("heard-*")]) == 2)
    (folder / "over").touch()
    drained = until(lambda: checkpointer.report().drained)
    checkpointer.close()
    whole = [path.parent.name for path in (folder / "far").glob("*/checkpoint.json")]
    return {"said": heard, "drained": drained, "far": len(whole)}


def slow_turns(folder: Path, world: World) -> Any:
    """One writer at a time, and all of them together take longer than a rank waits while nothing moves."""
    limits = Limits(job_writers=1, write_bytes_per_s=32_000, drain_bytes_per_s=64_000)
    options = {"remote": str(folder / "far"), "timeout_s": 1.6, "limits": limits, "on_drain_failure": "raise"}
    with Checkpointer(folder / "run", chunk_bytes=4096, world=world, **options) as checkpointer:
        checkpointer.save(1, state={f"w{at}": torch.full((10_000,), 1.0) for at in range(4)})
    real = Checkpoint._read_part

    def noted(checkpoint: Checkpoint, *given: Any, **more: Any) -> None:
        began = time.monotonic()
        real(checkpoint, *given, **more)
        with (folder / "reads").open("a") as file:
            file.write(json.dumps([began, time.monotonic(), world.rank]) + "\n")

    Checkpoint._read_part = noted  # type: ignore[method-assign]
    limits = Limits(job_readers=1, read_bytes_per_s=400_000)
    with Checkpointer(folder / "run", timeout_s=60, limits=limits, world=world) as again:
        again.restore(state={f"w{at}": torch.zeros(10_000) for at in range(4)})
    parts = sorted((folder / "far").glob("0*/part-*.bin"))
    order = [path.name for path in sorted(parts, key=lambda path: path.stat().st_mtime_ns)]
    reads = sorted(json.loads(line) for line in (folder / "reads").read_text().splitlines())
    at_once = [one for one, other in itertools.pairwise(reads) if one[2] != other[2] and one[1] > other[0]]
    report = checkpointer.report()
    return {"saves": report.saves, "drained": report.drained, "order": order, "read at once": at_once}


def a_rank_dies_in_between(folder: Path, world: World) -> Any:
    """No save is under way: who comes to the next one hears at once that one is missing."""
    checkpointer = Checkpointer(folder / "run", timeout_s=600, world=world)
    checkpointer.save(1, state=state(1))
    checkpointer.wait()
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said = ""
    try:
        checkpointer.save(2, state=state(2))
    except StokerError as error:
        said = error.message
    checkpointer.close()
    return {"said": said}


def a_second_one(folder: Path, world: World) -> Any:
    """On the address of one that is still open: refused on all ranks alike, and the first goes on."""
    options = {"board": f"127.0.0.1:{PORTS[3]}", "timeout_s": 60, "world": world}
    said = ""
    with Checkpointer(folder / "run", **options) as first:
        first.save(1, state=state(1))
        first.wait()
        try:
            Checkpointer(folder / "run", **options).save(2, state=state(2))
        except StokerError as error:
            said = error.hint
        first.save(3, state=state(3))
    return {"said": said, "saves": first.report().saves, "left": unfinished(folder / "run")}


def a_plan_fails(folder: Path, world: World, failing: int = 1) -> Any:
    """What one rank holds cannot be planned: all hear which rank it is, and go on together."""
    checkpointer = Checkpointer(folder / "run", every=4, timeout_s=60, world=world)
    extra = torch.ones(3).to_sparse() if world.rank == failing else torch.ones(3)
    began, said = time.monotonic(), []
    for act in (checkpointer.step, checkpointer.save):  # plans ahead; saves
        try:
            act(1, state=state(1), extra=extra)
        except StokerError as error:
            said.append(error.message)
    told = time.monotonic() - began < 30  # half of what a rank waits that is not told
    checkpointer.save(2, state=state(2))
    checkpointer.wait()
    step = checkpointer.latest().step
    checkpointer.close()
    return {"said": said, "told": told, "step": step}


def the_first_plan_fails(folder: Path, world: World) -> Any:
    return a_plan_fails(folder, world, failing=0)


SCENES = {
    "two_nodes": (2, two_nodes),
    "a_rank_dies": (2, a_rank_dies),
    "a_rank_dies_in_between": (3, a_rank_dies_in_between),
    "a_second_one": (2, a_second_one),
    "slow_turns": (4, slow_turns),
    "the_run_after": (1, the_run_after),
    "a_rank_fails": (2, a_rank_fails),
    "a_rank_fails_and_goes": (2, a_rank_fails_and_goes),
    "the_first_rank_fails": (2, the_first_rank_fails),
    "a_restore_fails": (2, a_restore_fails),
    "a_rank_leaves": (2, a_rank_leaves),
    "skips": (3, skips),
    "turns": (4, turns),
    "a_drain_fails": (2, a_drain_fails),
    "a_plan_fails": (3, a_plan_fails),
    "the_first_plan_fails": (3, the_first_plan_fails),
}


def main() -> None:
    for scene in sys.argv[2:]:
        folder = Path(sys.argv[1]) / scene
        folder.mkdir(parents=True)
        size, work = SCENES[scene]

        def act(world: World, folder: Path = folder, work: Any = work) -> None:
            report = work(folder, world)
            (folder / f"rank-{world.rank}.json").write_text(json.dumps(report))

        codes = run_ranks(size, act)
        ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]
        print("SCENE", json.dumps({"scene": scene, "codes": codes, "ranks": ranks}), flush=True)


KEPT: list[Checkpointer] = []
PORTS = free_ports(4)  # chosen before the forks: every rank must know them

if __name__ == "__main__":
    main()
