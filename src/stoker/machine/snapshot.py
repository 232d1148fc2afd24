"""Machine snapshot as plain values: what `stoker doctor` judges, here or on another machine.

    Snapshot
    ├── memory, limits, cgroup, cpu    what a process may use
    ├── disks, raids, places, lustre   block devices; the folders that matter and what they lie on
    ├── nics, gpus, gpu_stack          devices and the software under them
    └── surroundings, environ, log     container and scheduler, variables, lines of the kernel log

Every field may be Unknown, with the reason. None means that there is no such thing: no limit, no node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import StorageError, UnreadableError
from stoker.formats.small_json import read_json
from stoker.machine.plain import NOT_READ, Unknown, as_plain, from_plain
from stoker.machine.trials import Trials

VERSION = 1
UNLIMITED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The machine's memory, and /dev/shm in it."""

    total_bytes: int | Unknown = NOT_READ
    available_bytes: int | Unknown = NOT_READ
    swap_total_bytes: int | Unknown = NOT_READ
    swap_used_bytes: int | Unknown = NOT_READ
    swappiness: int | Unknown = NOT_READ
    huge_pages: str | Unknown = NOT_READ
    huge_pages_defrag: str | Unknown = NOT_READ
    zone_reclaim: int | Unknown = NOT_READ
    shm_bytes: int | Unknown = NOT_READ
    shm_used_bytes: int | Unknown = NOT_READ


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """This process's limits; UNLIMITED is -1."""

    memlock_soft_bytes: int | Unknown = NOT_READ
    memlock_hard_bytes: int | Unknown = NOT_READ
    open_files_soft: int | Unknown = NOT_READ
    open_files_hard: int | Unknown = NOT_READ
    may_lock_any: bool | Unknown = NOT_READ  # CAP_IPC_LOCK: the memlock limit does not bind
    processes_soft: int | Unknown = NOT_READ  # of this user, threads counted


@dataclass(frozen=True, kw_only=True, slots=True)
class Cgroup:
    """What the container, pod or job step allows: the least of a cgroup and those above it."""

    version: int | Unknown = NOT_READ
    memory_limit_bytes: int | Unknown | None = NOT_READ
    memory_used_bytes: int | Unknown = NOT_READ  # without page cache that can be dropped
    oom_kills: int | Unknown = NOT_READ
    cpu_limit_cores: float | Unknown | None = NOT_READ
    throttled_share: float | Unknown = NOT_READ  # of scheduling periods
    pids_limit: int | Unknown | None = NOT_READ  # processes and threads
    pids_used: int | Unknown = NOT_READ


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """Cores, which of them are ours, and how memory lies to them."""

    cores: int | Unknown = NOT_READ
    usable: tuple[int, ...] | Unknown = NOT_READ
    governors: tuple[str, ...] | Unknown = NOT_READ
    numa_nodes: tuple[tuple[int, ...], ...] | Unknown = NOT_READ  # the cores of each node
    numa_balancing: int | Unknown = NOT_READ
    idle_latency_us: int | Unknown | None = NOT_READ  # to wake from the deepest C-state that is allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class PcieLink:
    """A device's link as it is, and as device and slot could have it."""

    gen: int | Unknown = NOT_READ
    gen_max: int | Unknown = NOT_READ
    width: int | Unknown = NOT_READ
    width_max: int | Unknown = NOT_READ


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A block device."""

    name: str
    rotational: bool | Unknown = NOT_READ
    scheduler: str | Unknown = NOT_READ
    schedulers: tuple[str, ...] | Unknown = NOT_READ
    read_ahead_bytes: int | Unknown = NOT_READ
    numa_node: int | Unknown | None = NOT_READ
    bytes: int | Unknown = NOT_READ
    pcie: PcieLink | Unknown | None = NOT_READ  # of its controller


@dataclass(frozen=True, kw_only=True, slots=True)
class Raid:
    """An array of /proc/mdstat. None: it has no such thing."""

    name: str
    active: bool | Unknown = NOT_READ
    level: str | Unknown = NOT_READ
    members: int | Unknown | None = NOT_READ
    working: int | Unknown | None = NOT_READ
    action: str | Unknown | None = NOT_READ  # recovery, resync, reshape, check
    done_share: float | Unknown | None = NOT_READ


@dataclass(frozen=True, kw_only=True, slots=True)
class Lustre:
    """Settings of this client: the least of all its targets and mounts."""

    rpcs_in_flight: int | Unknown = NOT_READ
    read_ahead_mb: int | Unknown = NOT_READ
    read_ahead_per_file_mb: int | Unknown = NOT_READ


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder that matters, and the filesystem it lies on."""

    role: str  # data, cache, hub, root
    path: str
    given: bool = False  # by the user, who may want it changed; the others are guesses
    answers: bool | Unknown = NOT_READ  # False: a mount that hangs
    exists: bool | Unknown = NOT_READ
    broken_link: bool | Unknown = NOT_READ  # in its way: no folder can be made there
    writable: bool | Unknown = NOT_READ  # by this user; of a folder that is not there, the one above it
    mountpoint: str | Unknown = NOT_READ
    source: str | Unknown = NOT_READ
    filesystem: str | Unknown = NOT_READ
    options: tuple[str, ...] | Unknown = NOT_READ
    disk: str | Unknown | None = NOT_READ  # None: a filesystem without a block device
    total_bytes: int | Unknown = NOT_READ
    free_bytes: int | Unknown = NOT_READ
    held_bytes: int | Unknown = NOT_READ  # of a cache: what lies in it already
    total_inodes: int | Unknown = NOT_READ
    free_inodes: int | Unknown = NOT_READ
    read_ahead_bytes: int | Unknown = NOT_READ
    resent_share: float | Unknown = NOT_READ  # NFS requests that were sent again
    stripes: int | Unknown = NOT_READ  # Lustre; -1 is all
    stripe_bytes: int | Unknown = NOT_READ


@dataclass(frozen=True, kw_only=True, slots=True)
class Port:
    """What an RDMA device has besides: a port of InfiniBand or RoCE."""

    netdev: str | Unknown = NOT_READ  # its interface; "" where it has none
    layer: str | Unknown = NOT_READ  # InfiniBand or Ethernet
    state: str | Unknown = NOT_READ  # ACTIVE, INIT, DOWN
    physical: str | Unknown = NOT_READ  # LinkUp, Polling, Disabled
    lanes: int | Unknown = NOT_READ
    faults: Mapping[str, int] | Unknown = NOT_READ  # error counters that are not 0
    gids: Mapping[str, str] | Unknown = NOT_READ  # kind of address by index


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network interface or an RDMA device."""

    name: str
    rdma: bool = False
    up: bool | Unknown = NOT_READ
    speed_bytes_s: int | Unknown = NOT_READ
    numa_node: int | Unknown | None = NOT_READ
    mtu: int | Unknown = NOT_READ  # of an interface
    bridges: tuple[str, ...] | Unknown = NOT_READ  # PCI bridges above it, the nearest first
    pcie: PcieLink | Unknown | None = NOT_READ
    port: Port | Unknown | None = NOT_READ  # None: an interface


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One card."""

    index: int
    name: str | Unknown = NOT_READ
    bus: str | Unknown = NOT_READ
    numa_node: int | Unknown | None = NOT_READ
    persistence: bool | Unknown = NOT_READ
    ecc: bool | Unknown | None = NOT_READ  # None: a card without it
    ecc_uncorrected: int | Unknown = NOT_READ
    remap_pending: bool | Unknown = NOT_READ
    remap_failed: bool | Unknown = NOT_READ
    rows_remapped: int | Unknown = NOT_READ  # for uncorrected errors
    pages_retired: int | Unknown = NOT_READ  # cards before Ampere
    retire_pending: bool | Unknown = NOT_READ
    mig: bool | Unknown | None = NOT_READ  # None: a card without it
    fabric: str | Unknown | None = NOT_READ  # None: no NVSwitch is under it
    power_limit_w: float | Unknown = NOT_READ
    power_default_w: float | Unknown = NOT_READ
    clock_set_mhz: int | Unknown = NOT_READ  # application clocks: what somebody set, and the card's own
    clock_default_mhz: int | Unknown = NOT_READ
    slowdowns: tuple[str, ...] | Unknown = NOT_READ  # clock event reasons at this moment
    performance_state: int | Unknown = NOT_READ
    pcie_gen: int | Unknown = NOT_READ
    pcie_gen_max: int | Unknown = NOT_READ
    pcie_width: int | Unknown = NOT_READ
    pcie_width_max: int | Unknown = NOT_READ
    nvlinks: tuple[bool, ...] | Unknown = NOT_READ  # up or down, each
    pcie: PcieLink | Unknown | None = NOT_READ  # what the kernel says; the card's own best, not the slot's
    bridges: tuple[str, ...] | Unknown = NOT_READ  # above it, the nearest first
    iommu: str | Unknown | None = NOT_READ  # identity, DMA, DMA-FQ; None: not behind one
    redirects: tuple[str, ...] | Unknown = NOT_READ  # bridges above it on which ACS redirects


@dataclass(frozen=True, kw_only=True, slots=True)
class Inventory:
    """What NVML or nvidia-smi say of a machine: both tell the same."""

    driver: str
    cuda: str | Unknown
    cards: tuple[Gpu, ...]
    peers: tuple[tuple[str, ...], ...] | Unknown = NOT_READ  # row, column: OK or why not


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStack:
    """What lies between the cards and a program."""

    on_bus: int | Unknown = NOT_READ  # NVIDIA display devices on the PCI bus
    driver: str | Unknown = NOT_READ
    cuda: str | Unknown = NOT_READ  # the newest CUDA that the driver runs
    torch: str | Unknown | None = NOT_READ  # None: not installed
    torch_cuda: str | Unknown | None = NOT_READ  # None: a build for the CPU
    peers: tuple[tuple[str, ...], ...] | Unknown = NOT_READ  # row, column: OK or why not
    peer_memory: bool | Unknown = NOT_READ  # nvidia_peermem is loaded
    nvidia_fs: bool | Unknown = NOT_READ
    cufile: bool | Unknown = NOT_READ  # libcufile is installed
    cufile_compat: bool | Unknown = NOT_READ  # reads through host memory are allowed where need be


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What runs this process."""

    kernel: str | Unknown = NOT_READ
    container: str | Unknown | None = NOT_READ
    virtual: bool | Unknown = NOT_READ
    kubernetes: bool | Unknown = NOT_READ
    slurm: bool | Unknown = NOT_READ
    seccomp: bool | Unknown = NOT_READ  # system calls are filtered
    clock_synced: bool | Unknown = NOT_READ  # by NTP or PTP, as the kernel knows


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A machine at one moment."""

    version: int = VERSION
    memory: Memory = field(default_factory=Memory)
    limits: Limits = field(default_factory=Limits)
    cgroup: Cgroup = field(default_factory=Cgroup)
    cpu: Cpu = field(default_factory=Cpu)
    disks: tuple[Disk, ...] | Unknown = NOT_READ
    raids: tuple[Raid, ...] | Unknown = NOT_READ
    places: tuple[Place, ...] = ()
    lustre: Lustre | Unknown | None = NOT_READ
    nics: tuple[Nic, ...] | Unknown = NOT_READ
    gpus: tuple[Gpu, ...] | Unknown = NOT_READ
    gpu_stack: GpuStack = field(default_factory=GpuStack)
    surroundings: Surroundings = field(default_factory=Surroundings)
    environ: Mapping[str, str] = field(default_factory=dict)
    log: tuple[str, ...] | Unknown = NOT_READ  # lines that speak of faults
    trials: Trials | Unknown = NOT_READ  # what was tried, where it was asked for


def write_snapshot(snapshot: Snapshot, path: Path) -> None:
    """Record a machine as JSON."""
    try:
        path.write_text(json.dumps(as_plain(snapshot), indent=1) + "\n", "utf-8")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="name a file in a folder of yours"
        ) from error


def read_snapshot(path: Path) -> Snapshot:
    """A machine recorded by `stoker doctor --record`."""
    try:
        plain = read_json(path)
    except OSError as error:
        raise UnreadableError(
            f"{path} cannot be read: {error.strerror}", hint="record one with `stoker doctor --record FILE`"
        ) from error
    except ValueError as error:
        raise UnreadableError(f"{path} is not JSON: {error}", hint="record the machine again") from error
    if not isinstance(plain, dict) or plain.get("version") != VERSION:
        raise UnreadableError(
            f"{path} is no recorded machine of version {VERSION}",
            hint="record one with `stoker doctor --record FILE` of this release",
        )
    try:
        return from_plain(Snapshot, plain)
    except ValueError as error:
        raise UnreadableError(f"{path}: {error}", hint="record the machine again") from error
