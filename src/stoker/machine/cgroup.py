"""cgroup v1 and v2: what a container, pod or job step allows, the least of a group and those above it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from stoker.machine.files import Files
from stoker.machine.plain import Unknown, unread
from stoker.machine.snapshot import Cgroup

Amount = TypeVar("Amount", int, float)

_NO_LIMIT = 1 << 60  # v1 writes "none" as the highest page-aligned number


@dataclass(frozen=True, kw_only=True, slots=True)
class Names:
    """What a version calls its files, and the counters in them."""

    limit: str
    used: str
    droppable: str  # of memory.stat: page cache that gives way
    ooms: str


_NAMES = {
    1: Names(
        limit="memory.limit_in_bytes",
        used="memory.usage_in_bytes",
        droppable="total_inactive_file",
        ooms="memory.oom_control",
    ),
    2: Names(limit="memory.max", used="memory.current", droppable="inactive_file", ooms="memory.events"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Groups:
    """The folders of this process's memory, cpu and pids groups: its own first, then those above it."""

    version: int
    memory: list[str]
    cpu: list[str]
    pids: list[str]

    @property
    def names(self) -> Names:
        return _NAMES[self.version]


def find_groups(files: Files, *, process: str = "self") -> Groups | Unknown:
    """Where the groups of a process are, seen from here; a mount that holds v1's memory controller decides
    the version."""
    groups, mounts = files.text(f"/proc/{process}/cgroup"), files.text("/proc/self/mounts")
    if isinstance(groups, Unknown):
        return groups
    if isinstance(mounts, Unknown):
        return mounts
    own = dict(_groups(groups))
    memory, cpu, pids = (_folders(files, own, mounts, controller) for controller in ("memory", "cpu", "pids"))
    return Groups(version=1 if "memory" in own else 2, memory=memory, cpu=cpu, pids=pids)


def read_cgroup(files: Files, *, process: str = "self") -> Cgroup:
    """The limits in force on a process."""
    groups = find_groups(files, process=process)
    if isinstance(groups, Unknown):
        return unread(Cgroup, groups.reason)
    names, memory = groups.names, groups.memory
    quota = (
        _least_quota(files, groups.cpu)
        if groups.version == 1
        else _least(files, groups.cpu, "cpu.max", _cores)
    )
    return Cgroup(
        version=groups.version,
        memory_limit_bytes=_least(files, memory, names.limit, limit_of),
        memory_used_bytes=_used(files, memory, names),
        oom_kills=_counter(files, memory, names.ooms, "oom_kill"),
        cpu_limit_cores=quota,
        throttled_share=_throttled(files, groups.cpu),
        pids_limit=_least(files, groups.pids, "pids.max", limit_of),
        pids_used=files.number(f"{groups.pids[0]}/pids.current")
        if groups.pids and files.exists(f"{groups.pids[0]}/pids.current")
        else Unknown(reason="no cgroup counts processes"),
    )


def limit_of(text: str) -> int | None:
    """A limit of memory or processes; none where there is no limit."""
    return None if text == "max" or int(text) >= _NO_LIMIT else int(text)


def counters_of(text: str) -> dict[str, int]:
    """The lines of cpu.stat, memory.stat, memory.events and v1's memory.oom_control."""
    rows = map(str.split, text.splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _groups(text: str) -> Iterator[tuple[str, str]]:
    """The path of each controller; v2 has one path, under the empty name."""
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _folders(files: Files, own: dict[str, str], mounts: str, controller: str) -> list[str]:
    """The cgroup's folder and those above it. A container may see its own as the root, under a path of the
    host's that is not there: then the root alone."""
    mountpoint = _mountpoint(mounts, controller if controller in own else "")
    path = PurePosixPath(own.get(controller, own.get("", "/")))
    above = [mountpoint + str(part).rstrip("/") for part in (path, *path.parents)]
    return [folder for folder in above if files.exists(folder)]


def _mountpoint(mounts: str, controller: str) -> str:
    for line in mounts.splitlines():
        _, mountpoint, kind, options, *_ = line.split(" ")
        if kind == ("cgroup" if controller else "cgroup2") and (
            not controller or controller in options.split(",")
        ):
            return mountpoint
    return "/sys/fs/cgroup"


def _least(
    files: Files, folders: list[str], name: str, parse: Callable[[str], Amount | None]
) -> Amount | Unknown | None:
    read = [files.parsed(f"{folder}/{name}", parse) for folder in folders if files.exists(f"{folder}/{name}")]
    known = [value for value in read if value is not None and not isinstance(value, Unknown)]
    if known:
        return min(known)
    for value in read:
        if isinstance(value, Unknown):
            return value
    # the root of a machine's cgroups has no such file: nothing is limited
    return None if folders else Unknown(reason="no cgroup is mounted")


def _least_quota(files: Files, folders: list[str]) -> float | Unknown | None:
    found = []
    for folder in folders:
        quota, period = (files.number(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if isinstance(quota, int) and isinstance(period, int) and quota > 0 and period > 0:
            found.append(quota / period)
    if found:
        return min(found)
    return None if folders else Unknown(reason="no cpu cgroup is mounted")


def _cores(text: str) -> float | None:
    quota, period = text.split()
    return None if quota == "max" else int(quota) / int(period)


def _used(files: Files, folders: list[str], names: Names) -> int | Unknown:
    if not folders:
        return Unknown(reason="no memory cgroup is mounted")
    used = files.number(f"{folders[0]}/{names.used}")
    cached = _counter(files, folders, "memory.stat", names.droppable)
    if isinstance(used, Unknown) or isinstance(cached, Unknown):
        return used
    return max(0, used - cached)


def _throttled(files: Files, folders: list[str]) -> float | Unknown:
    periods = _counter(files, folders, "cpu.stat", "nr_periods")
    throttled = _counter(files, folders, "cpu.stat", "nr_throttled")
    if isinstance(periods, Unknown):
        return periods
    if isinstance(throttled, Unknown):
        return throttled
    return throttled / periods if periods else 0.0


def _counter(files: Files, folders: list[str], name: str, counter: str) -> int | Unknown:
    if not folders:
        return Unknown(reason="no cgroup is mounted")
    return files.parsed(f"{folders[0]}/{name}", lambda text: counters_of(text)[counter])
