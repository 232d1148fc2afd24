"""Memory, limits, cores, network interfaces: read from /proc and /sys."""

from __future__ import annotations

import os
import resource

from stoker.machine.files import Files, chosen, cpu_list, node_or_none
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import UNLIMITED, Cpu, Limits, Memory, Nic

_CAP_IPC_LOCK = 14


def read_memory(files: Files) -> Memory:
    """Memory of the machine; a cgroup may allow less."""
    info = files.parsed("/proc/meminfo", _meminfo)
    shm_bytes, shm_used_bytes = _shm()
    huge = "/sys/kernel/mm/transparent_hugepage"
    return Memory(
        total_bytes=_of(info, "MemTotal"),
        available_bytes=_of(info, "MemAvailable"),
        swap_total_bytes=_of(info, "SwapTotal"),
        swap_used_bytes=_of(info, "SwapUsed"),
        swappiness=files.number("/proc/sys/vm/swappiness"),
        huge_pages=files.parsed(f"{huge}/enabled", chosen),
        huge_pages_defrag=files.parsed(f"{huge}/defrag", chosen),
        zone_reclaim=files.number("/proc/sys/vm/zone_reclaim_mode"),
        shm_bytes=shm_bytes,
        shm_used_bytes=shm_used_bytes,
    )


def read_limits(files: Files) -> Limits:
    """Limits of this process: what it starts inherits them."""
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        memlock_soft_bytes=_limit(memlock[0]),
        memlock_hard_bytes=_limit(memlock[1]),
        open_files_soft=_limit(open_files[0]),
        open_files_hard=_limit(open_files[1]),
        may_lock_any=files.parsed("/proc/self/status", _may_lock_any),
    )


def read_cpu(files: Files) -> Cpu:
    """Cores, those this process may run on, their governors and NUMA nodes."""
    return Cpu(
        cores=os.cpu_count() or Unknown(reason="the system does not say how many cores it has"),
        usable=tuple(sorted(os.sched_getaffinity(0))),
        governors=_governors(files),
        numa_nodes=_numa_nodes(files),
        numa_balancing=files.number("/proc/sys/kernel/numa_balancing"),
    )


def read_nics(files: Files) -> tuple[Nic, ...] | Unknown:
    """Interfaces but the loopback, and RDMA devices."""
    names = files.names("/sys/class/net")
    if not names:
        return Unknown(reason="/sys/class/net shows no interface")
    nics = [_nic(files, name) for name in names if name != "lo"]
    rdma = [
        Nic(name=name, rdma=True, up=_port_up(files, name), numa_node=_node(files, f"infiniband/{name}"))
        for name in files.names("/sys/class/infiniband")
    ]
    return tuple(nics + rdma)


def _nic(files: Files, name: str) -> Nic:
    return Nic(
        name=name,
        up=files.parsed(f"/sys/class/net/{name}/operstate", lambda text: text != "down"),
        speed_bytes_s=_speed(files, name),
        numa_node=_node(files, f"net/{name}"),
    )


def _speed(files: Files, name: str) -> int | Unknown:
    megabits = files.number(f"/sys/class/net/{name}/speed")
    if isinstance(megabits, Unknown):
        return megabits
    return megabits * 125_000 if megabits > 0 else Unknown(reason=f"{name} does not say its speed")


def _node(files: Files, device: str) -> int | Unknown | None:
    path = f"/sys/class/{device}/device/numa_node"
    return files.parsed(path, node_or_none) if files.exists(path) else None


def _port_up(files: Files, name: str) -> bool | Unknown:
    return files.parsed(f"/sys/class/infiniband/{name}/ports/1/state", lambda text: "ACTIVE" in text)


def _meminfo(text: str) -> dict[str, int]:
    rows = (line.split() for line in text.splitlines())
    found = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3}
    if {"SwapTotal", "SwapFree"} <= set(found):
        found["SwapUsed"] = found["SwapTotal"] - found["SwapFree"]
    return found


def _of(info: dict[str, int] | Unknown, name: str) -> int | Unknown:
    if isinstance(info, Unknown):
        return info
    return info.get(name, Unknown(reason=f"/proc/meminfo has no {name}"))


def _shm() -> tuple[int | Unknown, int | Unknown]:
    try:
        stat = os.statvfs("/dev/shm")
    except OSError as error:
        reason = Unknown(reason=f"/dev/shm: {error.strerror}")
        return reason, reason
    return stat.f_blocks * stat.f_frsize, (stat.f_blocks - stat.f_bfree) * stat.f_frsize


def _limit(value: int) -> int:
    return UNLIMITED if value == resource.RLIM_INFINITY else value


def _may_lock_any(status: str) -> bool:
    rows = dict(line.partition(":")[::2] for line in status.splitlines())
    return bool(int(rows["CapEff"], 16) >> _CAP_IPC_LOCK & 1)


def _governors(files: Files) -> tuple[str, ...] | Unknown:
    base = "/sys/devices/system/cpu/cpufreq"
    read = [files.text(f"{base}/{name}/scaling_governor") for name in files.names(base)]
    found = sorted({text for text in read if isinstance(text, str)})
    return tuple(found) or Unknown(reason="no cpufreq here: a virtual machine's host decides")


def _numa_nodes(files: Files) -> tuple[tuple[int, ...], ...] | Unknown:
    base = "/sys/devices/system/node"
    names = sorted(
        (n for n in files.names(base) if n.removeprefix("node").isdigit()), key=lambda n: int(n[4:])
    )
    found = [files.parsed(f"{base}/{name}/cpulist", cpu_list) for name in names]
    for cores in found:
        if isinstance(cores, Unknown):
            return cores
    known = tuple(cores for cores in found if not isinstance(cores, Unknown))
    return known or Unknown(reason=f"{base} shows no node")
