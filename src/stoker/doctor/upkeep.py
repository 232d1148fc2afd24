"""Upkeep checks: C-states, the clock, RAID rebuilds, and how many processes may run."""

from __future__ import annotations

from collections.abc import Iterator

from stoker.doctor.check import Change, Check, Seen, about, cards, fail, for_whom, has_rdma, known, ok, warn
from stoker.doctor.need import Need
from stoker.formats.sizes import counted
from stoker.machine.snapshot import UNLIMITED, Raid, Snapshot

_LONG_SLEEP_US = 100  # what a message over InfiniBand takes twenty times
_THREADS_A_GPU = 512  # a rank of torch has 100 to 300: OMP, autograd, NCCL, pinning, the loader's
_PLENTY = 65_536


def idle_states(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    latency = known(snapshot.cpu.idle_latency_us)
    if latency is None:
        yield ok("the kernel has no C-states to choose from")
        return
    read = f"cores wake in {latency} µs at most"
    if latency <= _LONG_SLEEP_US or not cards(snapshot) or not has_rdma(snapshot):
        yield ok(read)
        return
    change = Change(do=_sleep(1), undo=_sleep(0))
    yield warn(read, change.do, changes=(change,))


def clock(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    if known(snapshot.surroundings.clock_synced):
        yield ok("kept by NTP or PTP")
        return
    on_host = "on the host: timedatectl set-ntp true"
    yield warn(
        "not synchronised",
        *for_whom(
            snapshot,
            kubernetes=on_host,
            container=on_host,
            machine="timedatectl set-ntp true  # or install chrony",
        ),
    )


def raids(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    arrays = known(snapshot.raids)
    if not arrays:
        return
    troubled = {raid.name: words for raid in arrays if (words := _trouble(raid))}
    for name, words in troubled.items():
        yield warn(
            f"{name}: {words}",
            f"mdadm --detail /dev/{name}; cat /proc/mdstat  # replace the disk, or wait for the end",
        )
    if not troubled:
        yield ok(f"{', '.join(raid.name for raid in arrays)} whole and at rest")


def processes(snapshot: Snapshot, need: Need) -> Iterator[Seen]:
    """Threads count as processes, for the cgroup and for the user's limit alike."""
    limit, used = known(snapshot.cgroup.pids_limit), snapshot.cgroup.pids_used
    left = None if limit is None else limit - (used if isinstance(used, int) else 0)
    soft = snapshot.limits.processes_soft
    if isinstance(soft, int) and soft != UNLIMITED:
        left = soft if left is None else min(left, soft)
    usual = _THREADS_A_GPU * max(1, len(cards(snapshot)))
    wanted = usual + (need.threads or 0)
    if left is None or left >= wanted:
        yield ok("no limit" if left is None else f"{left:,} more processes and threads may start")
        return
    tell = fail if need.threads is not None and left < wanted // 4 else warn
    yield tell(f"{left:,} more processes and threads may start; {wanted:,} are usual", *_fixes(snapshot))


def _trouble(raid: Raid) -> str:
    words = []
    if raid.active is False:
        words.append("not active")
    if isinstance(raid.members, int) and isinstance(raid.working, int) and raid.working < raid.members:
        words.append(f"{counted(raid.members - raid.working, 'disk')} of {raid.members} missing")
    if isinstance(raid.action, str):
        done = "" if not isinstance(raid.done_share, float) else f" {raid.done_share:.0%} done"
        words.append(f"{raid.action}{done}")
    return ", ".join(words)


def _fixes(snapshot: Snapshot) -> tuple[str, ...]:
    return for_whom(
        snapshot,
        kubernetes=f"on the node, kubelet's configuration: podPidsLimit: {_PLENTY}",
        slurm="on the nodes: systemctl edit slurmd  # [Service] TasksMax=infinity",
        container=f"docker run --pids-limit={_PLENTY} …",
        machine="systemctl set-property user-$(id -u).slice TasksMax=infinity  # and ulimit -u",
    )


def _sleep(disabled: int) -> str:
    states = "/sys/devices/system/cpu/cpu*/cpuidle/state*"
    deep = f"[ $(cat $s/latency) -le {_LONG_SLEEP_US} ]"
    return f"for s in {states}; do {deep} || echo {disabled} > $s/disable; done"


MEMORY = about(
    "memory",
    Check(
        "process limit",
        processes,
        "Every thread of every rank and worker counts; at the limit `can't start new thread` ends the job, "
        "often only when the first checkpoint or evaluation starts more of them.",
    ),
)
CPU = about(
    "CPU",
    Check(
        "C-states",
        idle_states,
        "A core in a deep sleep answers an interrupt late: small messages between nodes, and launches after "
        "a wait, take many times as long.",
    ),
)
STORAGE = about(
    "storage",
    Check(
        "RAID",
        raids,
        "An array that rebuilds or checks itself gives its jobs what is left, and one without its spare disk "
        "is one fault from losing the data.",
    ),
)
SURROUNDINGS = about(
    "surroundings",
    Check(
        "clock",
        clock,
        "Object stores refuse requests that are a quarter of an hour off, certificates look expired, and "
        "logs of nodes cannot be laid side by side.",
    ),
)
