"""A machine at one moment, as plain values: what `stoker doctor` judges, here or on another machine.

    Snapshot
    ├── memory, limits, cgroup, cpu    what a process may use
    ├── disks, places                  block devices; the folders that matter and what they lie on
    ├── nics, gpus, gpu_stack          devices and the software under them
    └── surroundings, environ, log     container and scheduler, variables, lines of the kernel log

Every field may be Unknown, with the reason. None means that there is no such thing: no limit, no node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.errors import BadInputError, StorageError
from stoker.machine.plain import NOT_READ, Unknown, as_plain, from_plain

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Cgroup:
    """What the container, pod or job step allows: the least of a cgroup and those above it."""

    version: int | Unknown = NOT_READ
    memory_limit_bytes: int | Unknown | None = NOT_READ
    memory_used_bytes: int | Unknown = NOT_READ  # without page cache that can be dropped
    oom_kills: int | Unknown = NOT_READ
    cpu_limit_cores: float | Unknown | None = NOT_READ
    throttled_share: float | Unknown = NOT_READ  # of scheduling periods


@dataclass(frozen=True, kw_only=True, slots=True)
class Cpu:
    """Cores, which of them are ours, and how memory lies to them."""

    cores: int | Unknown = NOT_READ
    usable: tuple[int, ...] | Unknown = NOT_READ
    governors: tuple[str, ...] | Unknown = NOT_READ
    numa_nodes: tuple[tuple[int, ...], ...] | Unknown = NOT_READ  # the cores of each node
    numa_balancing: int | Unknown = NOT_READ


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder that matters, and the filesystem it lies on."""

    role: str  # data, cache, hub, root
    path: str
    given: bool = False  # by the user, who may want it changed; the others are guesses
    answers: bool | Unknown = NOT_READ  # False: a mount that hangs
    exists: bool | Unknown = NOT_READ
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
class Nic:
    """A network interface or an RDMA device."""

    name: str
    rdma: bool = False
    up: bool | Unknown = NOT_READ
    speed_bytes_s: int | Unknown = NOT_READ
    numa_node: int | Unknown | None = NOT_READ


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


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuStack:
    """What lies between the cards and a program."""

    on_bus: int | Unknown = NOT_READ  # NVIDIA display devices on the PCI bus
    driver: str | Unknown = NOT_READ
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A machine at one moment."""

    version: int = VERSION
    memory: Memory = field(default_factory=Memory)
    limits: Limits = field(default_factory=Limits)
    cgroup: Cgroup = field(default_factory=Cgroup)
    cpu: Cpu = field(default_factory=Cpu)
    disks: tuple[Disk, ...] | Unknown = NOT_READ
    places: tuple[Place, ...] = ()
    nics: tuple[Nic, ...] | Unknown = NOT_READ
    gpus: tuple[Gpu, ...] | Unknown = NOT_READ
    gpu_stack: GpuStack = field(default_factory=GpuStack)
    surroundings: Surroundings = field(default_factory=Surroundings)
    environ: Mapping[str, str] = field(default_factory=dict)
    log: tuple[str, ...] | Unknown = NOT_READ  # lines that speak of faults


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
        plain = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror}", hint="record one with `stoker doctor --record FILE`"
        ) from error
    except ValueError as error:
        raise BadInputError(f"{path} is not JSON: {error}", hint="record the machine again") from error
    if not isinstance(plain, dict) or plain.get("version") != VERSION:
        raise BadInputError(
            f"{path} is no recorded machine of version {VERSION}",
            hint="record one with `stoker doctor --record FILE` of this release",
        )
    try:
        return from_plain(Snapshot, plain)
    except ValueError as error:
        raise BadInputError(f"{path}: {error}", hint="record the machine again") from error
