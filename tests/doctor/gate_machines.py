"""The gate: thirty machines before four jobs, and for each whether the job may start, and what stops it.

A machine is a recorded one with a change. `stops` names the checks that fail, by job; the others start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from machines import GIB, machine

from stoker.doctor.need import Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Cgroup, Limits, Snapshot
from stoker.plan.arithmetic import make_plan
from stoker.plan.job import Job

JOBS: Mapping[str, Need] = {
    "one GPU": make_plan(
        Job(gpus_per_node=1, parameters=1e8, batch=8, tokens=1024, sample=4096, dataset=20 * GIB)
    ).needs(),
    "one node": make_plan(
        Job(gpus_per_node=8, parameters=7e9, batch=4, tokens=4096, sample=16384, dataset=500 * GIB)
    ).needs(),
    "16 nodes": make_plan(
        Job(nodes=16, gpus_per_node=8, parameters=7e10, batch=2, tokens=8192, sample=32768, dataset=8 << 40)
    ).needs(),
    "workers": make_plan(
        Job(gpus_per_node=8, step=0.25, batch=64, sample=120_000, decoded=602_112, dataset=200 * GIB,
            loader="process", workers=8)
    ).needs(),
}  # fmt: skip
ALL, FULL_NODES = tuple(JOBS), ("one node", "16 nodes", "workers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    name: str
    make: Callable[[], Snapshot]
    stops: Mapping[str, tuple[str, ...]]  # checks that fail, by job
    why: str


GOOD = machine("good_node")
CACHE = next(place for place in GOOD.places if place.role == "cache")
CARDS = () if isinstance(GOOD.gpus, Unknown) else GOOD.gpus
NICS = () if isinstance(GOOD.nics, Unknown) else GOOD.nics


def good(**changes: Any) -> Snapshot:
    return replace(GOOD, **changes)


def cache(**changes: Any) -> Snapshot:
    others = tuple(place for place in GOOD.places if place.role != "cache")
    return replace(GOOD, places=(*others, replace(CACHE, **changes)))


def card(**changes: Any) -> Snapshot:
    return replace(GOOD, gpus=(replace(CARDS[0], **changes), *CARDS[1:]))


def on(jobs: tuple[str, ...], *checks: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(jobs, checks)


def limits(**changes: Any) -> Limits:
    return replace(GOOD.limits, **changes)


def log(line: str) -> Snapshot:
    return good(log=(line,))


ETHERNET = tuple(nic for nic in NICS if not nic.rdma)
DARK = tuple(
    replace(nic, up=False, port=replace(nic.port, state="DOWN")) if nic.rdma and nic.port else nic
    for nic in NICS
)
LITTLE = {"memlock_soft_bytes": 65536, "memlock_hard_bytes": 65536}
XID = "NVRM: Xid (PCI:0000:18:00)"

CASES = (
    Case(name="a good node", make=good, stops={}, why="nothing is wrong with it"),
    Case(
        name="64 KiB of memlock, no RDMA",
        make=lambda: good(limits=limits(**LITTLE), nics=ETHERNET), stops={},
        why="nobody registers memory; CUDA's own does not count",
    ),
    Case(
        name="64 KiB of memlock under InfiniBand", make=lambda: good(limits=limits(**LITTLE)),
        stops=on(("16 nodes",), "locked memory"), why="only the job of many nodes registers memory",
    ),
    Case(
        name="1,024 open files, more to be had",
        make=lambda: good(limits=limits(open_files_soft=1024)), stops={}, why="the job raises them itself",
    ),
    Case(
        name="1,024 open files for good",
        make=lambda: good(limits=limits(open_files_soft=1024, open_files_hard=1024)),
        stops={}, why="some hundred shards and as many sockets fit",
    ),
    Case(
        name="512 open files for good",
        make=lambda: good(limits=limits(open_files_soft=512, open_files_hard=512)),
        stops=on(ALL, "open files"), why="a rank's own are as many, before a shard",
    ),
    Case(
        name="7 of 8 cards", make=lambda: good(gpus=CARDS[1:]), stops=on(FULL_NODES, "GPUs"),
        why="a rank has no card",
    ),
    Case(name="no cards", make=lambda: good(gpus=()), stops=on(ALL, "GPUs"), why="nothing to train on"),
    Case(
        name="a driver that does not answer",
        make=lambda: good(gpus=Unknown(reason="NVML: Driver Not Loaded")),
        stops=on(ALL, "GPUs"), why="cards on the bus that nobody can use",
    ),
    Case(name="a card in MIG", make=lambda: card(mig=True), stops=on(ALL, "MIG"), why="a rank sees a slice"),
    Case(
        name="a bad row that could not be replaced", make=lambda: card(remap_failed=True),
        stops=on(ALL, "memory rows"), why="the card is worn",
    ),
    Case(
        name="a card outside the fabric", make=lambda: card(fabric="In Progress"),
        stops=on(ALL, "NVSwitch fabric"), why="CUDA does not start",
    ),
    Case(
        name="one NVLink down", make=lambda: card(nvlinks=(*[True] * 17, False)), stops=on(ALL, "NVLink"),
        why="every collective waits for it",
    ),
    Case(
        name="a card that runs hot", make=lambda: card(slowdowns=("hardware thermal slowdown",)), stops={},
        why="slower, and told; it works",
    ),
    Case(
        name="torch for the CPU", make=lambda: good(gpu_stack=replace(GOOD.gpu_stack, torch_cuda=None)),
        stops=on(ALL, "torch build"), why="it would train on the CPU",
    ),
    Case(
        name="torch newer than the driver",
        make=lambda: good(gpu_stack=replace(GOOD.gpu_stack, cuda="12.2", torch_cuda="13.0")),
        stops=on(ALL, "torch build"), why="CUDA of another major version",
    ),
    Case(
        name="torch a minor version newer",
        make=lambda: good(gpu_stack=replace(GOOD.gpu_stack, cuda="12.2", torch_cuda="12.8")), stops={},
        why="CUDA runs within a major version",
    ),
    Case(
        name="a read-only cache", make=lambda: cache(options=("ro", "noatime")),
        stops=on(ALL, "writable cache"), why="nothing can be staged",
    ),
    Case(
        name="a cache behind a link to an unmounted disk", make=lambda: cache(broken_link=True),
        stops=on(ALL, "writable cache"), why="no folder can be made there",
    ),
    Case(
        name="another user's cache", make=lambda: cache(writable=False), stops=on(ALL, "writable cache"),
        why="nothing can be staged",
    ),
    Case(
        name="a full cache",
        make=lambda: cache(free_bytes=1 << 20, held_bytes=0), stops=on(ALL, "free space"),
        why="no shard fits",
    ),
    Case(
        name="a full cache that holds the job", make=lambda: cache(free_bytes=1 << 20, held_bytes=4 << 40),
        stops={}, why="a job that comes back finds its share",
    ),
    Case(
        name="a cache for a small job", make=lambda: cache(free_bytes=100 * GIB, held_bytes=0),
        stops=on(FULL_NODES, "free space"), why="room for 20 GiB, not for the others' share",
    ),
    Case(
        name="a cache without inodes",
        make=lambda: cache(free_inodes=3, total_inodes=1_000_000, held_bytes=0),
        stops=on(ALL, "free inodes"), why="no file can be made, whatever is free",
    ),
    Case(
        name="shared memory of a container",
        make=lambda: good(memory=replace(GOOD.memory, shm_bytes=64 << 20, shm_used_bytes=0)),
        stops=on(ALL, "shared memory"), why="NCCL alone wants a GiB for each GPU",
    ),
    Case(
        name="8 GiB of shared memory",
        make=lambda: good(memory=replace(GOOD.memory, shm_bytes=8 * GIB, shm_used_bytes=0)),
        stops=on(("workers",), "shared memory"), why="enough for NCCL, not for workers' batches besides",
    ),
    Case(
        name="a pod with 64 GiB", make=lambda: good(cgroup=Cgroup(version=2, memory_limit_bytes=64 * GIB)),
        stops=on(FULL_NODES, "memory limit"), why="eight ranks need more",
    ),
    Case(
        name="a quota of four cores",
        make=lambda: good(cgroup=Cgroup(version=2, memory_limit_bytes=None, cpu_limit_cores=4.0)),
        stops=on(FULL_NODES, "cores"), why="a GPU is fed by four, eight are not",
    ),
    Case(
        name="no active InfiniBand port", make=lambda: good(nics=DARK), stops=on(("16 nodes",), "RDMA ports"),
        why="only the job of many nodes talks over it",
    ),
    Case(
        name="a card that fell off an hour ago",
        make=lambda: log(f"[3600 s ago] {XID}: 79, fallen off the bus"),
        stops=on(ALL, "GPU errors"), why="it will again",
    ),
    Case(
        name="a card that fell off ten days ago",
        make=lambda: log(f"[864000 s ago] {XID}: 79, fallen off the bus"), stops={}, why="seen to since",
    ),
    Case(
        name="a row replaced an hour ago",
        make=lambda: log(f"[3600 s ago] {XID}: 63, Row Remapper"), stops={},
        why="the card has mended itself",
    ),
    Case(
        name="every kernel waited for", make=lambda: good(environ={"CUDA_LAUNCH_BLOCKING": "1"}),
        stops=on(ALL, "torch variables"), why="left over from finding a bug",
    ),
    Case(
        name="a card that needs a reset",
        make=lambda: log(f"[60 s ago] {XID}: 154, GPU recovery action changed"),
        stops=on(ALL, "GPU errors"), why="the driver says so",
    ),
)  # fmt: skip


def page() -> str:
    """docs/reference/gate.md."""
    head = " | ".join(JOBS)
    parts = [
        "# What the gate stops\n\n"
        "Generated from `tests/doctor/gate_machines.py` by `docs/reference/make.py`: "
        "machines before `stoker doctor --for plan.json`, which ends with 1 where a check fails. They are "
        "recorded ones with a change; the jobs' needs are what `stoker plan` says of a job of one GPU, of "
        "one node and of 16, and of one with eight DataLoader workers a rank. A test holds every cell; "
        "`tests/integration/test_gate.py` makes some of the machines in namespaces.\n\n"
        f"| machine | {head} | why |\n|---|{'---|' * len(JOBS)}---|\n"
    ]
    for case in CASES:
        cells = " | ".join(
            f"**{', '.join(case.stops[job])}**" if job in case.stops else "starts" for job in JOBS
        )
        parts.append(f"| {case.name} | {cells} | {case.why} |\n")
    return "".join(parts)
