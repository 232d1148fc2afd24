"""Rank, node and world size: who am I in this job, from torch.distributed and the launcher's environment.

torch.distributed knows, once it is initialised, whoever started the processes (Lightning, accelerate,
mp.spawn); it is asked only where the program has imported it. The environment says the rest: torchrun and
DeepSpeed set RANK and friends, mpirun OMPI_COMM_WORLD_RANK or PMI_RANK, srun SLURM_PROCID, a Kubernetes
indexed Job JOB_COMPLETION_INDEX (one pod is one node there; its manifest passes the count as STOKER_NODES,
which Kubernetes itself does not). With none of these the job is one process. Two sources that contradict
each other are refused.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from stoker.errors import UsageError

TORCH = "torch.distributed"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
    guesses_nodes: bool = False  # nobody said how many there are: all ranks go on as if there were one

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
    def here(cls, environ: Mapping[str, str] = os.environ, modules: Mapping[str, Any] = sys.modules) -> World:
        """As torch.distributed has it, where that is initialised by now; else as the environment has it."""
        group = torch_group(modules)
        if group is None:
            return cls.from_environ(environ)
        try:
            around = cls.from_environ(environ)
        except UsageError:  # the odd variables of a launcher that nobody needs
            around = cls()
        return _agreed(*group, around, environ)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> World:
        """Read the launcher's variables; the innermost launcher wins (torchrun inside srun)."""
        if "RANK" in environ and (found := _torchrun(environ)):
            return found
        return next(_others(environ), cls())

    @property
    def knows_nodes(self) -> bool:
        """Whether `node` and `local_rank` are known: torch.distributed alone says nothing of machines, nor do
        RANK and WORLD_SIZE, unless the ranks meet at an address that no other machine could."""
        return not self.guesses_nodes or any(f"MASTER_ADDR={one}" in self.run.split() for one in _LOOPBACK)

    @property
    def may_span_nodes(self) -> bool:
        """Whether ranks may run on other machines than this one, as far as is known."""
        return self.nodes > 1 or (not self.knows_nodes and "MASTER_ADDR=" in self.run)

    def split(self, part: int, parts: int) -> World:
        """The place of one of several equal parts of this process, such as the workers of a DataLoader."""
        return replace(
            self,
            rank=self.rank * parts + part,
            size=self.size * parts,
            local_rank=self.local_rank * parts + part,
            local_size=self.local_size * parts,
        )


def torch_group(modules: Mapping[str, Any] = sys.modules) -> tuple[int, int] | None:
    """Rank and size of torch's default group. Asked of what the program imported: torch is heavy."""
    distributed = modules.get(TORCH)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.get_rank(), distributed.get_world_size()


def loader_worker(modules: Mapping[str, Any] = sys.modules) -> tuple[int, int] | None:
    """Which worker of how many of a torch DataLoader this process is, if it is one."""
    data = modules.get("torch.utils.data")
    info = data.get_worker_info() if data else None
    return (info.id, info.num_workers) if info else None


def job_name(environ: Mapping[str, str] = os.environ) -> str:
    """What the runs of one job share, however often it is requeued; empty where nothing tells.

    $STOKER_JOB; Slurm's job, or task of an array, which keeps its number when it is requeued; torchrun's id;
    a Kubernetes Job by its pods' name, NAME-INDEX-ABCDE or NAME-ABCDE."""
    if environ.get("STOKER_JOB"):
        return environ["STOKER_JOB"]
    if environ.get("SLURM_ARRAY_JOB_ID"):
        return f"slurm {environ['SLURM_ARRAY_JOB_ID']}_{environ.get('SLURM_ARRAY_TASK_ID', '')}"
    if environ.get("SLURM_JOB_ID"):
        return f"slurm {environ['SLURM_JOB_ID']}"
    if environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        return f"torchrun {environ['TORCHELASTIC_RUN_ID']}"
    if environ.get("KUBERNETES_SERVICE_HOST"):
        pod = re.fullmatch(r"(.+?)(-\d+)?-[a-z0-9]{5}", environ.get("HOSTNAME", ""))
        return f"kubernetes {pod[1]}" if pod else ""
    return ""


# A rank, and nothing beside it that says of how many: Lightning's, PMIx's, MVAPICH's.
_RANKS_ALONE = ("LOCAL_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK")


def unnamed_siblings(environ: Mapping[str, str] = os.environ) -> str:
    """What says that this is one of several processes, where nothing says which; empty: nothing does."""
    if "RANK" in environ:
        return ""
    told = {name: environ.get(name, "") for name in ("WORLD_SIZE", *_RANKS_ALONE)}
    several = told["WORLD_SIZE"] not in ("", "0", "1") or any(
        told[name] not in ("", "0") for name in _RANKS_ALONE
    )
    return ", ".join(f"{name}={value}" for name, value in told.items() if value) if several else ""


def _agreed(rank: int, size: int, around: World, environ: Mapping[str, str]) -> World:
    """The place that torch.distributed names, with what the environment adds to it."""
    if (rank, size) == (around.rank, around.size):
        return around
    if around.launcher == "single":
        local_rank = _integer(environ, "LOCAL_RANK", rank)
        # How many nodes there are is not known here, and must be the same on every rank: one.
        return World(
            rank=rank,
            size=size,
            local_rank=local_rank if 0 <= local_rank < size else rank,
            local_size=size,
            launcher=TORCH,
            run=_named(environ, "MASTER_ADDR", "MASTER_PORT"),
            guesses_nodes=size > 1,
        )
    each, left = divmod(size, around.size)
    if each and not left and rank // each == around.rank:  # each of the launcher's processes started several
        return replace(around.split(rank % each, each), launcher=TORCH)
    raise UsageError(
        f"{TORCH} says that this is rank {rank} of {size}, the variables of {around.launcher} say rank "
        f"{around.rank} of {around.size}",
        hint="start the job in one way, unset variables that are left over, or pass world=stoker.World(...)",
    )


# torchrun's id is `none` unless one was given; two jobs that share a node then differ by their port.
_TORCHRUN_RUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
_NO_STEP = 0xFFFFFFF0  # from here on: the batch script itself, salloc's shell, what is outside of steps
_SLURM_RUN = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


def _named(environ: Mapping[str, str], *names: str) -> str:
    return " ".join(f"{name}={environ[name]}" for name in names if name in environ)


def _torchrun(environ: Mapping[str, str]) -> World | None:
    """Also DeepSpeed's launcher, which calls some of it otherwise, and those who set RANK by hand."""
    if "ACCELERATE_DEBUG_RDV_FILE" in environ:  # accelerate's debug_launcher: it writes RANK=0 in every rank
        return None
    rank, size = _integer(environ, "RANK"), _integer(environ, "WORLD_SIZE", 1)
    told = local_size = _integer(environ, "LOCAL_WORLD_SIZE", _integer(environ, "LOCAL_SIZE", 0))
    if not told:
        if around := _around(environ, rank, size):
            return around
        # on one node, as far as is known: every rank must come to the same number of nodes
        local_size = size if "LOCAL_RANK" in environ else 1
    each = max(1, local_size)
    return World(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "LOCAL_RANK", rank % each),
        local_size=local_size,
        node=_integer(environ, "GROUP_RANK", _integer(environ, "CROSS_RANK", rank // each)),
        nodes=_integer(environ, "GROUP_WORLD_SIZE", _integer(environ, "CROSS_SIZE", -(-size // each))),
        launcher="torchrun",
        run=_named(environ, *_TORCHRUN_RUN, *_SLURM_RUN),
        guesses_nodes=not told and local_size > 1,
    )


def _around(environ: Mapping[str, str], rank: int, size: int) -> World | None:
    """What the launcher around RANK says of nodes, if it counts the same ranks: a script has copied RANK from
    SLURM_PROCID, or DeepSpeed has set it to what MPI told it, without LOCAL_WORLD_SIZE."""
    with suppress(UsageError):  # the odd variables of a launcher that nobody needs
        return next((one for one in _others(environ) if (one.rank, one.size) == (rank, size)), None)
    return None


def _others(environ: Mapping[str, str]) -> Iterator[World]:
    """What the launchers but torchrun say, the innermost first."""
    for variable, reader in (
        ("OMPI_COMM_WORLD_RANK", _openmpi),
        ("PMI_RANK", _pmi),
        ("SLURM_PROCID", _slurm),
        ("JOB_COMPLETION_INDEX", _kubernetes),
    ):
        if variable in environ and (found := reader(environ)):
            yield found


def _openmpi(environ: Mapping[str, str]) -> World:
    rank, size = (_integer(environ, f"OMPI_COMM_WORLD_{name}") for name in ("RANK", "SIZE"))
    local_size = _integer(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    nodes = _integer(environ, "OMPI_MCA_orte_num_nodes", -(-size // max(1, local_size)))
    return World(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "OMPI_COMM_WORLD_LOCAL_RANK", rank),
        local_size=local_size,
        node=min(rank // max(1, local_size), max(0, nodes - 1)),
        nodes=nodes,
        launcher="mpirun",
        run=_named(environ, "PMIX_NAMESPACE", *_SLURM_RUN[:1]),
    )


def _pmi(environ: Mapping[str, str]) -> World | None:
    """MPICH's and Intel's mpiexec. Slurm sets the same for its own steps, and says more itself."""
    rank, size = _integer(environ, "PMI_RANK"), _integer(environ, "PMI_SIZE", 1)
    if environ.get("SLURM_PROCID") == str(rank) and _step(environ, "NTASKS", 1) == size:
        return None
    local_size = _integer(environ, "MPI_LOCALNRANKS", size)
    return World(
        rank=rank,
        size=size,
        local_rank=_integer(environ, "MPI_LOCALRANKID", rank),
        local_size=local_size,
        node=rank // max(1, local_size),
        nodes=-(-size // max(1, local_size)),
        launcher="mpirun",
        run=_named(environ, "PMI_JOBID", *_SLURM_RUN[:1]),
    )


def _slurm(environ: Mapping[str, str]) -> World | None:
    """A task of a step. What an sbatch script starts without srun is one process, however many tasks its job
    asked for."""
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if not step.isdigit() or int(step) >= _NO_STEP:
        return None
    size, nodes = _step(environ, "NTASKS", 1), _step(environ, "NNODES", 1)
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


# What a step calls its own numbers; the plain names may be those of the whole job.
_OF_STEP = {"NTASKS": "NUM_TASKS", "NNODES": "NUM_NODES"}


def _step(environ: Mapping[str, str], name: str, default: int) -> int:
    return _integer(environ, f"SLURM_STEP_{_OF_STEP[name]}", _integer(environ, f"SLURM_{name}", default))


def _tasks_on_node(environ: Mapping[str, str], size: int, nodes: int) -> int:
    """SLURM_TASKS_PER_NODE reads like `4(x2),3`: four tasks on two nodes, then three on one."""
    node = _integer(environ, "SLURM_NODEID", 0)
    name = "SLURM_STEP_TASKS_PER_NODE"
    name = name if name in environ else "SLURM_TASKS_PER_NODE"
    for part in filter(None, environ.get(name, "").split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            raise UsageError(
                f"{name}={environ[name]!r} does not read like 4(x2),3", hint=f"unset {name} or correct it"
            )
        count = int(found[2] or 1)
        if node < count:
            return int(found[1])
        node -= count
    return -(-size // max(1, nodes))


def _kubernetes(environ: Mapping[str, str]) -> World:
    index = _integer(environ, "JOB_COMPLETION_INDEX")
    if "STOKER_NODES" not in environ:
        raise UsageError(
            f"JOB_COMPLETION_INDEX={index} says that this is one pod of a Job, and nothing says of how many",
            hint="set STOKER_NODES to the Job's completions, or pass world=stoker.World(...)",
        )
    nodes = _integer(environ, "STOKER_NODES")
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
