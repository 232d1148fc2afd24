"""Host inventory: memory, limits, cores, network interfaces, from /proc and /sys."""

from __future__ import annotations

import os
import resource

from stoker.machine.files import Files, chosen, cpu_list, node_or_none
from stoker.machine.pci import read_link
from stoker.machine.plain import Unknown
from stoker.machine.rdma import read_rdma
from stoker.machine.snapshot import UNLIMITED, Cpu, Limits, Memory, Nic

_CAP_IPC_LOCK = 14


def read_memory(files: Files) -> Memory:
    """Memory of the machine; a cgroup may allow less."""
    info = files.parsed("/proc/meminfo", meminfo_of)
    shm_bytes, shm_used_bytes = shm_of(files)
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
        processes_soft=_limit(resource.getrlimit(resource.RLIMIT_NPROC)[0]),
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
        idle_latency_us=_idle_latency(files),
    )


def read_nics(files: Files) -> tuple[Nic, ...] | Unknown:
    """Interfaces but the loopback, and RDMA ports."""
    base = "/sys/class/net"  # beside folders it may hold files, such as bonding_masters
    names = [name for name in files.names(base) if files.exists(f"{base}/{name}/operstate")]
    if not names:
        return Unknown(reason=f"{base} shows no interface")
    nics = [_nic(files, name) for name in names if name != "lo"]
    return (*nics, *read_rdma(files))


def _nic(files: Files, name: str) -> Nic:
    return Nic(
        name=name,
        up=files.parsed(f"/sys/class/net/{name}/operstate", lambda text: text != "down"),
        speed_bytes_s=_speed(files, name),
        numa_node=_node(files, f"net/{name}"),
        mtu=files.number(f"/sys/class/net/{name}/mtu"),
        pcie=read_link(files, f"/sys/class/net/{name}/device"),
        port=None,
    )


def _speed(files: Files, name: str) -> int | Unknown:
    """Of a real interface: a pod's veth says 10 Gbit/s whatever lies beneath it."""
    if not files.exists(f"/sys/class/net/{name}/device"):
        return Unknown(reason=f"{name} is virtual: its speed is that of what lies beneath it")
    megabits = files.number(f"/sys/class/net/{name}/speed")
    if isinstance(megabits, Unknown):
        return megabits
    return megabits * 125_000 if megabits > 0 else Unknown(reason=f"{name} does not say its speed")


def _node(files: Files, device: str) -> int | Unknown | None:
    path = f"/sys/class/{device}/device/numa_node"
    return files.parsed(path, node_or_none) if files.exists(path) else None


def meminfo_of(text: str) -> dict[str, int]:
    """Bytes by name."""
    rows = (line.split() for line in text.splitlines())
    found = {row[0].rstrip(":"): int(row[1]) << 10 for row in rows if len(row) == 3}
    if {"SwapTotal", "SwapFree"} <= set(found):
        found["SwapUsed"] = found["SwapTotal"] - found["SwapFree"]
    return found


def _of(info: dict[str, int] | Unknown, name: str) -> int | Unknown:
    if isinstance(info, Unknown):
        return info
    return info.get(name, Unknown(reason=f"/proc/meminfo has no {name}"))


def shm_of(files: Files) -> tuple[int | Unknown, int | Unknown]:
    """Size of /dev/shm, and how much of it is taken."""
    try:
        stat = os.statvfs(files.at("/dev/shm"))
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


def _idle_latency(files: Files) -> int | Unknown | None:
    """Of the deepest C-state that is not switched off; None where the kernel has none to choose from."""
    base = "/sys/devices/system/cpu/cpu0/cpuidle"
    states = [f"{base}/{name}" for name in files.names(base) if name.startswith("state")]
    allowed = [state for state in states if files.text(f"{state}/disable") in ("0", "")]
    read = [files.number(f"{state}/latency") for state in allowed]
    return max((value for value in read if isinstance(value, int)), default=None)


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
