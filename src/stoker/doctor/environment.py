"""Environment-variable checks: what slows a job down, forgotten in a shell's start-up file or an image."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stoker.doctor.check import Check, Level, Seen, about, cards, cores_a_rank, has_rdma, ok, warn
from stoker.doctor.need import Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Snapshot


def _always(snapshot: Snapshot) -> bool:
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class Pitfall:
    """A variable, the values of it that hurt, where, and how. `family` is the check that tells."""

    family: str
    variable: str
    hurts: Callable[[str], bool]
    how: str
    where: Callable[[Snapshot], bool] = _always
    fix: str = ""
    level: Level = "warn"


def _on(value: str) -> bool:
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _off(value: str) -> bool:
    return value.strip().lower() in ("0", "false", "no", "off")


def _is(*values: str) -> Callable[[str], bool]:
    return lambda value: value.strip().upper() in values


def _with_cards(snapshot: Snapshot) -> bool:
    return bool(cards(snapshot))


def _with_peers(snapshot: Snapshot) -> bool:
    return len(cards(snapshot)) > 1


PITFALLS = (
    Pitfall(family="NCCL", variable="NCCL_P2P_DISABLE", hurts=_on, where=_with_peers,
            how="cards talk through the host"),
    Pitfall(family="NCCL", variable="NCCL_P2P_LEVEL", hurts=_is("LOC", "0"), where=_with_peers,
            how="cards talk through the host"),
    Pitfall(family="NCCL", variable="NCCL_SHM_DISABLE", hurts=_on, where=_with_peers,
            how="ranks of a node talk over sockets"),
    Pitfall(family="NCCL", variable="NCCL_IB_DISABLE", hurts=_on, where=has_rdma,
            how="nodes talk over TCP"),
    Pitfall(family="NCCL", variable="NCCL_NET_GDR_LEVEL", hurts=_is("LOC", "0"), where=has_rdma,
            how="no GPUDirect RDMA"),
    Pitfall(family="NCCL", variable="NCCL_DEBUG", hurts=_is("TRACE"), how="every call is logged",
            fix="export NCCL_DEBUG=WARN"),
    Pitfall(family="NCCL", variable="NCCL_ALGO", hurts=_on, how="one algorithm for all sizes"),
    Pitfall(family="NCCL", variable="NCCL_PROTO", hurts=_on, how="one protocol for all sizes"),
    Pitfall(family="NCCL", variable="NCCL_MAX_NCHANNELS", hurts=_is("1", "2"), how="too few channels"),
    Pitfall(family="NCCL", variable="NCCL_ASYNC_ERROR_HANDLING", hurts=_off, how="a lost rank hangs the job"),
    Pitfall(family="torch", variable="TORCH_NCCL_ASYNC_ERROR_HANDLING", hurts=_off,
            how="a lost rank hangs the job"),
    Pitfall(family="torch", variable="TORCH_NCCL_BLOCKING_WAIT", hurts=_on,
            how="the host waits in collectives"),
    Pitfall(family="torch", variable="TORCH_DISTRIBUTED_DEBUG", hurts=_is("DETAIL"),
            how="every collective is checked"),
    Pitfall(family="torch", variable="CUDA_LAUNCH_BLOCKING", hurts=_on, level="fail",
            how="the host waits for every kernel"),
    Pitfall(family="torch", variable="PYTORCH_NO_CUDA_MEMORY_CACHING", hurts=_on, level="fail",
            how="every tensor is a cudaMalloc"),
    Pitfall(family="torch", variable="NVIDIA_TF32_OVERRIDE", hurts=_off, how="fp32 products without tf32"),
    Pitfall(family="torch", variable="CUDA_VISIBLE_DEVICES", hurts=_is("", "-1", "NODEVFILES"),
            where=_with_cards, level="fail", how="no card is visible"),
    Pitfall(family="torch", variable="CUDA_CACHE_DISABLE", hurts=_on,
            how="kernels are compiled at every start"),
    Pitfall(family="OMP", variable="OMP_PROC_BIND", hurts=_is("MASTER", "PRIMARY"),
            how="all threads of a process share one core"),
    Pitfall(family="OMP", variable="GOMP_CPU_AFFINITY", hurts=_on,
            how="all processes are bound to the same cores"),
    Pitfall(family="OMP", variable="KMP_AFFINITY", hurts=lambda value: "compact" in value,
            how="all processes are bound to the same cores"),
)  # fmt: skip


def nccl(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    found = [*_found(snapshot, "NCCL"), *_interface(snapshot)]
    yield from found or [ok(_set(snapshot, "NCCL_"))]


def torch(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    yield from list(_found(snapshot, "torch")) or [ok("nothing that slows it down")]


def omp(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    found = [*_found(snapshot, "OMP"), *_threads(snapshot)]
    yield from found or [ok(_set(snapshot, "OMP_"))]


def _found(snapshot: Snapshot, family: str) -> Iterator[Seen]:
    for pitfall in PITFALLS:
        value = snapshot.environ.get(pitfall.variable)
        if pitfall.family != family or value is None:
            continue
        if pitfall.hurts(value) and pitfall.where(snapshot):
            yield Seen(
                level=pitfall.level,
                read=f"{pitfall.variable}={value}: {pitfall.how}",
                fix=(pitfall.fix or f"unset {pitfall.variable}",),
            )


def _interface(snapshot: Snapshot) -> Iterator[Seen]:
    """NCCL_SOCKET_IFNAME is a list of prefixes; `=` asks for whole names, `^` leaves them out."""
    value = snapshot.environ.get("NCCL_SOCKET_IFNAME", "")
    if not value or value.startswith("^") or isinstance(snapshot.nics, Unknown):
        return
    names = [nic.name for nic in snapshot.nics if not nic.rdma]
    wanted = [name.partition(":")[0] for name in value.removeprefix("=").split(",")]
    if wanted == ["lo"] or any(name.startswith(prefix) for name in names for prefix in wanted if prefix):
        return
    yield Seen(
        level="fail",
        read=f"NCCL_SOCKET_IFNAME={value}: no such interface among {', '.join(names) or 'none'}",
        fix=("unset NCCL_SOCKET_IFNAME  # or name one of them",),
    )


def _threads(snapshot: Snapshot) -> Iterator[Seen]:
    value = snapshot.environ.get("OMP_NUM_THREADS", "")
    if not value.isdigit() or isinstance(snapshot.cpu.usable, Unknown):
        return
    ranks, each = max(1, len(cards(snapshot))), cores_a_rank(snapshot)
    if int(value) > 2 * each:
        yield warn(
            f"OMP_NUM_THREADS={value} × {ranks} ranks, {each} cores are there for each",
            f"export OMP_NUM_THREADS={each}",
        )


def _set(snapshot: Snapshot, family: str) -> str:
    names = [f"{name}={value}" for name, value in snapshot.environ.items() if name.startswith(family)]
    return ", ".join(names) or f"no {family.rstrip('_')} variable is set"


CHECKS = about(
    "environment",
    Check(
        "NCCL variables",
        nccl,
        "Settings that helped once on one machine turn off NVLink, RDMA or tuning on all others.",
    ),
    Check(
        "torch variables",
        torch,
        "What was set to find a bug makes the host wait for the card at every step.",
    ),
    Check(
        "OMP variables",
        omp,
        "Threads of all ranks on the same few cores starve the loader's own threads.",
    ),
)
