"""Who am I in this job: rank, node, world size, read once from the launcher's environment; and how many
cores this process may use.

torchrun sets RANK and friends, Slurm sets SLURM_PROCID and friends, a Kubernetes indexed Job sets
JOB_COMPLETION_INDEX (one pod is one node there; its manifest passes the count as STOKER_NODES, which
Kubernetes itself does not). With none of these the job is one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """This process's place among all processes of the job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = "single"
    run: str = ""  # what tells this launch from others, the same in all its processes; empty if nothing does

    def __post_init__(self) -> None:
        for name, index, count in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("node", self.node, self.nodes),
        ):
            if not 0 <= index < count:
                raise UsageError(
                    f"{self.launcher}: {name} {index} of {count} is impossible",
                    hint="check the launcher's environment variables",
                )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Read the launcher's variables; the innermost launcher wins (torchrun inside srun)."""
        for variable, reader in (
            ("RANK", _torchrun),
            ("SLURM_PROCID", _slurm),
            ("JOB_COMPLETION_INDEX", _kubernetes),
        ):
            if variable in environ:
                return reader(environ)
        return cls()


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: under taskset or a container's quota that is not all of them."""
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = (cgroup / "cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    return cores


# torchrun's id is `none` unless one was given; two jobs that share a node then differ by their port.
_TORCHRUN_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_SLURM_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def _named(environ: Mapping[str, str], *names: str) -> str:
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _torchrun(environ: Mapping[str, str]) -> World:
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE", 1)
    local_size = _integer(environ, "LOCAL_WORLD_SIZE", 1)
    return World(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "LOCAL_RANK", rank % local_size),
        local_size=local_size,
        node=_integer(environ, "GROUP_RANK", rank // local_size),
        nodes=_integer(environ, "GROUP_WORLD_SIZE", -(-size // local_size)),
        launcher="torchrun",
        run=_named(environ, *_TORCHRUN_RUN, *_SLURM_RUN),
    )


def _slurm(environ: Mapping[str, str]) -> World:
    size, nodes = _integer(environ, "SLURM_NTASKS", 1), _integer(environ, "SLURM_NNODES", 1)
    local_rank = _integer(environ, "SLURM_LOCALID", 0)
    return World(
        rank=_integer(environ, "SLURM_PROCID"),
        size=size,
        local_rank=local_rank,
        local_size=max(local_rank + 1, _tasks_on_node(environ, size, nodes)),
        node=_integer(environ, "SLURM_NODEID", 0),
        nodes=nodes,
        launcher="slurm",
        run=_named(environ, *_SLURM_RUN),
    )


def _tasks_on_node(environ: Mapping[str, str], size: int, nodes: int) -> int:
    """SLURM_TASKS_PER_NODE reads like `4(x2),3`: four tasks on two nodes, then three on one."""
    node, text = _integer(environ, "SLURM_NODEID", 0), environ.get("SLURM_TASKS_PER_NODE", "")
    for part in filter(None, text.split(",")):
        tasks, _, repeat = part.partition("(x")
        count = int(repeat.rstrip(")")) if repeat else 1
        if node < count:
            return int(tasks)
        node -= count
    return -(-size // nodes)


def _kubernetes(environ: Mapping[str, str]) -> World:
    index = _integer(environ, "JOB_COMPLETION_INDEX")
    nodes = _integer(environ, "STOKER_NODES", index + 1)
    return World(rank=index, size=nodes, node=index, nodes=nodes, launcher="kubernetes")


def _integer(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environ.get(name)
    if text is None:
        if default is None:
            raise UsageError(f"{name} is not set", hint="start the job through its launcher")
        return default
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name}={text!r} is not a number", hint=f"unset {name} or correct it") from None
