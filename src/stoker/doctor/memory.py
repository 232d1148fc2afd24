"""Memory checks: shared memory, limits, locked memory, swap, huge pages."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.doctor.check import (
    Check,
    Seen,
    about,
    cards,
    fail,
    for_whom,
    has_rdma,
    known,
    ok,
    say,
    set_for_good,
    warn,
)
from stoker.doctor.need import SHM_A_GPU, Need
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import UNLIMITED, Snapshot

_CONTAINER_SHM = 64 << 20  # what docker and containerd give
_USUAL_MEMLOCK = 1 << 30
_USUAL_OPEN_FILES = 4096  # a DataLoader's worker passes every tensor as a file descriptor
_CALM_SWAPPINESS = 10


def shared_memory(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    size, used = known(snapshot.memory.shm_bytes), known(snapshot.memory.shm_used_bytes)
    free, wanted = size - used, need.shm_bytes or SHM_A_GPU * max(1, len(cards(snapshot)))
    read = f"/dev/shm has {say(size)}, {say(used)} of it used"
    fixes = _shm_fixes(snapshot, wanted + used)
    if need.shm_bytes is not None and free < need.shm_bytes:
        yield fail(f"{read}; {say(need.shm_bytes)} are needed", *fixes)
    elif size <= _CONTAINER_SHM and need.shm_bytes is None:
        yield fail(f"{read}: the container default", *fixes)
    elif free < wanted and need.shm_bytes is None:
        yield warn(f"{read}; {say(wanted)} is usual for {max(1, len(cards(snapshot)))} GPU", *fixes)
    else:
        yield ok(read)


def memory_limit(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    limit, total = known(snapshot.cgroup.memory_limit_bytes), known(snapshot.memory.total_bytes)
    allowed = total if limit is None else min(limit, total)
    read = f"{say(allowed)} may be used" + ("" if limit is None else f" (cgroup limit {say(limit)})")
    if need.memory_bytes is not None and allowed < need.memory_bytes:
        yield fail(
            f"{read}; {say(need.memory_bytes)} are needed", *_memory_fixes(snapshot, need.memory_bytes)
        )
        return
    used = snapshot.cgroup.memory_used_bytes
    if limit is not None and not isinstance(used, Unknown) and used > 0.9 * limit:
        yield warn(f"{read}, {say(used)} are used already", *_memory_fixes(snapshot, 2 * used))
    else:
        yield ok(read)


def shared_memory_in_limit(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    limit = known(snapshot.cgroup.memory_limit_bytes)
    if limit is None:
        return
    shm = known(snapshot.memory.shm_bytes)
    read = f"limit {say(limit)} − /dev/shm {say(shm)}"
    if shm >= limit and not isinstance(snapshot.surroundings.container, str):
        yield ok(f"{read}: what lies in it counts")  # the machine's own, which nobody sized for this job
        return
    if shm >= limit:
        yield warn(
            f"{read}: a full /dev/shm is the whole limit, and processes are killed before it is full",
            *_shm_fixes(snapshot, need.shm_bytes or limit // 4),
        )
        return
    read = f"{read} = {say(limit - shm)} for processes"
    if need.memory_bytes is not None and limit - shm < need.memory_bytes - (need.shm_bytes or 0):
        wanted = need.memory_bytes - (need.shm_bytes or 0)
        yield fail(f"{read}; they need {say(wanted)}", *_memory_fixes(snapshot, wanted + shm))
    else:
        yield ok(read)


def locked_memory(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    soft, hard = known(snapshot.limits.memlock_soft_bytes), known(snapshot.limits.memlock_hard_bytes)
    read = f"memlock {say(soft)} (hard {say(hard)})"
    wanted = need.memlock_bytes if need.memlock_bytes is not None else _USUAL_MEMLOCK
    if soft == UNLIMITED or soft >= wanted:
        yield ok(read)
        return
    if not isinstance(snapshot.nics, Unknown) and not has_rdma(snapshot):
        yield ok(f"{read}; no RDMA device is here to register memory")
        return
    fixes = _memlock_fixes(snapshot, hard, wanted)
    if need.memlock_bytes is not None:
        read += f"; {say(need.memlock_bytes)} are needed"
    if snapshot.limits.may_lock_any is True:
        yield warn(f"{read}; CAP_IPC_LOCK lifts it for this process, not for one without", *fixes)
    elif has_rdma(snapshot):
        yield fail(read, *fixes)
    else:
        yield warn(read, *fixes)


def open_files(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    soft, hard = known(snapshot.limits.open_files_soft), known(snapshot.limits.open_files_hard)
    read = f"{_count(soft)} open files (hard {_count(hard)})"
    wanted = need.open_files if need.open_files is not None else _USUAL_OPEN_FILES
    if soft == UNLIMITED or soft >= wanted:
        yield ok(read)
        return
    reachable = hard == UNLIMITED or hard >= wanted
    fixes: tuple[str, ...] = (f"ulimit -n {max(wanted, 65536) if hard == UNLIMITED else hard}",)
    if not reachable:
        fixes = _ulimit_fixes(snapshot, "nofile", "1048576", service="LimitNOFILE=1048576")
    tell = fail if need.open_files is not None and not reachable else warn
    yield tell(f"{read}; {wanted:,} are {'needed' if need.open_files is not None else 'usual'}", *fixes)


def swap(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    total, used = known(snapshot.memory.swap_total_bytes), known(snapshot.memory.swap_used_bytes)
    if not total:
        yield ok("no swap")
        return
    swappiness = known(snapshot.memory.swappiness)
    read = f"{say(used)} of {say(total)} swap used, swappiness {swappiness}"
    if swappiness > _CALM_SWAPPINESS:
        yield warn(read, set_for_good("vm.swappiness", 1))
    else:
        yield ok(read)


def huge_pages(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    enabled, defrag = known(snapshot.memory.huge_pages), known(snapshot.memory.huge_pages_defrag)
    base = "/sys/kernel/mm/transparent_hugepage"
    read = f"transparent huge pages {enabled}, defrag {defrag}"
    if enabled == "never":
        yield warn(read, f"echo madvise > {base}/enabled")
    elif defrag == "always":
        yield warn(f"{read}: an allocation may wait for compaction", f"echo madvise > {base}/defrag")
    else:
        yield ok(read)


def zone_reclaim(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    mode = known(snapshot.memory.zone_reclaim)
    if mode:
        yield warn(f"vm.zone_reclaim_mode is {mode}", set_for_good("vm.zone_reclaim_mode", 0))
    else:
        yield ok("vm.zone_reclaim_mode is 0")


def _count(value: int) -> str:
    return "unlimited" if value == UNLIMITED else f"{value:,}"


def _gib(count: int) -> int:
    return -(-count // (1 << 30))


def _shm_fixes(snapshot: Snapshot, count: int) -> tuple[str, ...]:
    size = max(1, _gib(count))
    return for_whom(
        snapshot,
        kubernetes=(
            f"spec.volumes: [{{name: dshm, emptyDir: {{medium: Memory, sizeLimit: {size}Gi}}}}]",
            "spec.containers[].volumeMounts: [{name: dshm, mountPath: /dev/shm}]",
        ),
        container=f"docker run --shm-size={size}g …  # or --ipc=host",
        machine=f"mount -o remount,size={size}G /dev/shm",
    )


def _memory_fixes(snapshot: Snapshot, count: int) -> tuple[str, ...]:
    size = max(1, _gib(count))
    return for_whom(
        snapshot,
        kubernetes=f"spec.containers[].resources.limits: {{memory: {size}Gi}}",
        slurm=f"#SBATCH --mem={size}G",
        container=f"docker run --memory={size}g …",
        machine=f"run on a machine with {size} GiB, or make batches, prefetch or the model's state smaller",
    )


def _memlock_fixes(snapshot: Snapshot, hard: int, wanted: int) -> tuple[str, ...]:
    if hard == UNLIMITED or hard >= wanted:  # a shell counts in KiB
        return (f"ulimit -l {'unlimited' if hard == UNLIMITED else hard >> 10}",)
    return _ulimit_fixes(snapshot, "memlock", "unlimited", service="LimitMEMLOCK=infinity")


def _ulimit_fixes(snapshot: Snapshot, name: str, value: str, *, service: str) -> tuple[str, ...]:
    """The line for whoever starts the process: a limit cannot be raised from inside."""
    pod = f"on the node: systemctl edit containerd  # [Service] {service}"
    if name == "memlock":
        pod = 'spec.containers[].securityContext: {capabilities: {add: ["IPC_LOCK"]}}'
    number = "-1" if value == "unlimited" else value
    return for_whom(
        snapshot,
        kubernetes=pod,
        slurm=f"on the nodes: systemctl edit slurmd  # [Service] {service}; "
        f"in slurm.conf: PropagateResourceLimitsExcept={name.upper()}",
        container=f"docker run --ulimit {name}={number}:{number} …",
        # `*` is everybody but root, and a file for each limit: the next fix must not overwrite this one
        machine=f"printf '%s\\n' '* - {name} {value}' 'root - {name} {value}' > "
        f"/etc/security/limits.d/90-stoker-{name}.conf  # then log in anew",
    )


CHECKS = about(
    "memory",
    Check(
        "shared memory",
        shared_memory,
        "Worker processes pass batches, and NCCL its buffers, through /dev/shm. Where it is full they die "
        "with a bus error. Stoker's own loader uses threads and needs none of it.",
    ),
    Check(
        "memory limit",
        memory_limit,
        "A process that goes over its limit is killed without a word; page cache, which makes the second "
        "epoch quick, lives inside the limit too.",
    ),
    Check(
        "shared memory in the limit",
        shared_memory_in_limit,
        "What lies in /dev/shm counts against the container's memory limit, an emptyDir's sizeLimit too: a "
        "limit of 100 GiB with 32 GiB of /dev/shm leaves 68 GiB for processes.",
    ),
    Check(
        "locked memory",
        locked_memory,
        "RDMA (NCCL over InfiniBand, RoCE or EFA) and mlock() register memory against this limit, and fail "
        "past it. CUDA's own pinned memory does not count.",
    ),
    Check(
        "open files",
        open_files,
        "Every shard, connection and tensor passed between processes is an open file; past the limit the "
        "loader dies with `Too many open files`, hours into a run.",
    ),
    Check(
        "swap",
        swap,
        "Reading a dataset fills the page cache; a kernel that would rather swap pushes out the memory of "
        "the training process, and a step takes seconds.",
    ),
    Check(
        "huge pages",
        huge_pages,
        "Pinning and copying gigabytes page by page costs 512 times as many entries; defrag=always makes an "
        "allocation wait while the kernel moves pages.",
    ),
    Check(
        "zone reclaim",
        zone_reclaim,
        "With it a NUMA node drops page cache of its own rather than use memory of another: staged data is "
        "read from disk again.",
    ),
)
