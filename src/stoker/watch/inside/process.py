"""Process identity: when this one began, what it is called in the run, whether it is a loader's worker."""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path
from typing import Any

from stoker.processes import started
from stoker.redact import redact_args
from stoker.watch.runs.files import VERSION, Clock, node_name, process_key
from stoker.world import World

_RANKS = (
    "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "PALS_RANKID",
    "ALPS_APP_PE",
)  # fmt: skip


def began() -> float:
    """When this process began, on the monotonic clock."""
    ticks = int(started(os.getpid()))
    # Counted from boot; the monotonic clock leaves out the time the machine was suspended.
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - max(0.0, age)


def own_key(folder: Path) -> str:
    """What this process is called in the run; another name where one of its number has been there before: it
    was replaced (exec), or a container was started again."""
    key = process_key(node_name(), os.getpid())
    names = itertools.chain([key], (f"{key}x{again}" for again in itertools.count(2)))
    return next(name for name in names if not (folder / f"spans-{name}.ring").exists())


def is_loader_worker() -> bool:
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def world() -> World:
    """As the launcher's variables say; of one that sets others, or odd ones, at least the rank."""
    try:
        found = World.from_environ()
    except Exception:  # a launcher's odd variables are not ours to judge here
        found = World()
    if found.launcher != "single":
        return found
    told = [int(value) for name in _RANKS if (value := os.environ.get(name, "")).isdigit()]
    return World(rank=told[0], size=told[0] + 1, local_rank=0, launcher="unknown") if told else found


def identity(world: World, key: str) -> dict[str, Any]:
    """What the meta file of this process begins with."""
    return {
        "version": VERSION,
        "key": key,
        "pid": os.getpid(),
        "node": node_name(),
        "rank": world.rank,
        "world": world.size,
        "began": time.time(),
        "clock": Clock.here().as_dict(),
        "python": sys.version.split()[0],
        "argv": redact_args(sys.argv[:50]),
        "nccl_env": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
    }
