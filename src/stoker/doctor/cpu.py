"""CPU checks: cores, quota, governor, NUMA: how many, how fast, how near to the cards."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.doctor.check import (
    Change,
    Check,
    Seen,
    about,
    cards,
    cores_a_rank,
    fail,
    for_whom,
    known,
    ok,
    set_for_good,
    warn,
)
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Snapshot

_CORES_PER_GPU = 4  # two that read and copy, one that trains, one for NCCL and the system
_THROTTLED_SHARE = 0.01


def cores(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    usable, limit = len(known(snapshot.cpu.usable)), known(snapshot.cgroup.cpu_limit_cores)
    count = usable if limit is None else min(float(usable), limit)
    read = f"{count:g} of {counted(known(snapshot.cpu.cores), 'core')}" + (
        "" if limit is None else f" (quota {limit:g})"
    )
    wanted = need.cpu_cores if need.cpu_cores is not None else _CORES_PER_GPU * len(cards(snapshot))
    if count >= wanted:
        yield ok(read)
        return
    tell = fail if need.cpu_cores is not None else warn
    yield tell(
        f"{read}; {wanted} are {'needed' if tell is fail else 'usual'}", *_core_fixes(snapshot, wanted)
    )


def quota(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    limit, usable = known(snapshot.cgroup.cpu_limit_cores), len(known(snapshot.cpu.usable))
    if limit is None or limit >= usable:
        yield ok("no quota below the cores that are seen")
        return
    read = f"quota {counted(limit, 'core')}, {usable} are seen"
    share = snapshot.cgroup.throttled_share
    if not isinstance(share, Unknown) and share > _THROTTLED_SHARE:
        read += f", stopped in {share:.0%} of the periods"
    each, threads = cores_a_rank(snapshot), snapshot.environ.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads) <= each:
        yield ok(f"{read}; OMP_NUM_THREADS={threads} keeps to it")
        return
    yield warn(read, f"export OMP_NUM_THREADS={each}", *_quota_fixes(snapshot, usable))


def governor(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    governors = known(snapshot.cpu.governors)
    slow = [name for name in governors if name not in ("performance", "schedutil")]
    read = f"CPU governor {', '.join(governors)}"
    if not slow:
        yield ok(read)
        return
    files = "/sys/devices/system/cpu/cpufreq/policy*/scaling_governor"
    change = Change(do=_write_all(files, "performance"), undo=_write_all(files, slow[0]))
    yield warn(read, change.do, changes=(change,))


def numa(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    nodes, usable = known(snapshot.cpu.numa_nodes), set(known(snapshot.cpu.usable))
    if len(nodes) < 2:
        yield ok("one NUMA node")
        return
    ours = {number for number, members in enumerate(nodes) if usable & set(members)}
    far: dict[int, list[int]] = {}
    for gpu in cards(snapshot):
        if isinstance(gpu.numa_node, int) and gpu.numa_node not in ours:
            far.setdefault(gpu.numa_node, []).append(gpu.index)
    for node, gpus in far.items():
        yield warn(
            f"GPU {_list(gpus)} on node {node}, this process may run on node {_list(ours)} only",
            f"numactl --cpunodebind={node} --membind={node} COMMAND",
        )
    if not far:
        yield ok(f"{len(nodes)} NUMA nodes, cores of node {_list(ours)}, " + _where(snapshot))


def numa_devices(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    nodes = known(snapshot.cpu.numa_nodes)
    feeding = {gpu.numa_node for gpu in cards(snapshot) if isinstance(gpu.numa_node, int)}
    if len(nodes) < 2 or not feeding:
        return
    stray = [(name, node) for name, node in _devices(snapshot) if node not in feeding]
    for name, node in stray:
        yield warn(
            f"{name} hangs on node {node}, the GPUs on node {_list(feeding)}",
            f"numactl --cpunodebind={node} COMMAND  # for what reads {name}, or use a device on node "
            f"{_list(feeding)}",
        )
    if not stray:
        yield ok(f"network and disks hang on the nodes of the GPUs ({_list(feeding)})")


def numa_balancing(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    nodes, balancing = known(snapshot.cpu.numa_nodes), known(snapshot.cpu.numa_balancing)
    if balancing and len(nodes) > 1 and cards(snapshot):
        yield warn(
            f"kernel.numa_balancing is {balancing}",
            set_for_good("kernel.numa_balancing", 0),
        )
    else:
        yield ok(f"kernel.numa_balancing is {balancing} on {len(nodes)} node{'s' * (len(nodes) > 1)}")


def _devices(snapshot: Snapshot) -> list[tuple[str, int]]:
    """RDMA devices, and NVMe disks that a folder of ours lies on."""
    used = {place.disk for place in snapshot.places if place.role in ("data", "cache")}
    found: list[tuple[str, int]] = []
    for nic in () if isinstance(snapshot.nics, Unknown) else snapshot.nics:
        if nic.rdma and isinstance(nic.numa_node, int):
            found.append((nic.name, nic.numa_node))
    for disk in () if isinstance(snapshot.disks, Unknown) else snapshot.disks:
        if disk.name in used and isinstance(disk.numa_node, int):
            found.append((disk.name, disk.numa_node))
    return found


def _where(snapshot: Snapshot) -> str:
    gpus = sorted({gpu.numa_node for gpu in cards(snapshot) if isinstance(gpu.numa_node, int)})
    return f"GPUs on node {_list(gpus)}" if gpus else "no GPU says its node"


def _list(numbers: set[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def _write_all(files: str, value: str) -> str:
    return f"for f in {files}; do echo {value} > $f; done"


def _core_fixes(snapshot: Snapshot, wanted: int) -> tuple[str, ...]:
    cores = f'{{cpu: "{wanted}"}}'
    return for_whom(
        snapshot,
        kubernetes=f"spec.containers[].resources: {{requests: {cores}, limits: {cores}}}",
        slurm=f"#SBATCH --cpus-per-task={wanted}",
        container=f"docker run --cpus={wanted} …",
        machine=f"run on a machine with {counted(wanted, 'core')}, or fewer GPUs a node",
    )


def _quota_fixes(snapshot: Snapshot, usable: int) -> tuple[str, ...]:
    return for_whom(
        snapshot,
        kubernetes="kubelet: --cpu-manager-policy=static  # and requests = limits in whole cores: pinned, "
        "no quota",
        container=f"docker run --cpuset-cpus=0-{usable - 1} …  # cores of its own in place of --cpus",
        machine=None,
    )


CHECKS = about(
    "CPU",
    Check(
        "cores",
        cores,
        "Reading, decoding and copying for one GPU takes cores; with too few of them the loader is late "
        "however fast the disk is.",
    ),
    Check(
        "CPU quota",
        quota,
        "Programs start a thread for each core they see; when the quota is less, the kernel stops all of "
        "them for the rest of each 100 ms, and batches come in bursts.",
    ),
    Check(
        "CPU governor",
        governor,
        "A core that clocks down between batches needs milliseconds to come up again; launches and copies "
        "are late each time.",
    ),
    Check(
        "NUMA of cores",
        numa,
        "Buffers on another node than the GPU cross the socket link on the way to it, and share it with "
        "everybody.",
    ),
    Check(
        "NUMA of devices",
        numa_devices,
        "Data from a disk or adapter on another node than the GPU crosses the socket link, and GPUDirect "
        "does not work across it at full speed.",
    ),
    Check(
        "NUMA balancing",
        numa_balancing,
        "The kernel unmaps pages to see who uses them; pinned buffers and kernel launches pay for the "
        "faults, in jitter between ranks.",
    ),
)
