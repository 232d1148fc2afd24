"""What a container, pod or job step allows: cgroup v1 and v2, the least of a group and those above it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import TypeVar

from stoker.machine.files import Files
from stoker.machine.plain import Unknown, unread
from stoker.machine.snapshot import Cgroup

Amount = TypeVar("Amount", int, float)

_NO_LIMIT = 1 << 60  # v1 writes "none" as the highest page-aligned number


def read_cgroup(files: Files) -> Cgroup:
    """The limits in force on this process."""
    groups, mounts = files.text("/proc/self/cgroup"), files.text("/proc/self/mounts")
    if isinstance(groups, Unknown):
        return unread(Cgroup, groups.reason)
    if isinstance(mounts, Unknown):
        return unread(Cgroup, mounts.reason)
    own = dict(_groups(groups))
    memory, cpu = (_folders(files, own, mounts, controller) for controller in ("memory", "cpu"))
    return _version1(files, memory, cpu) if "memory" in own else _version2(files, memory, cpu)


def _version2(files: Files, memory: list[str], cpu: list[str]) -> Cgroup:
    return Cgroup(
        version=2,
        memory_limit_bytes=_least(files, memory, "memory.max", _limit_bytes),
        memory_used_bytes=_used(files, memory, current="memory.current", droppable="inactive_file"),
        oom_kills=_counter(files, memory, "memory.events", "oom_kill"),
        cpu_limit_cores=_least(files, cpu, "cpu.max", _cores),
        throttled_share=_throttled(files, cpu),
    )


def _version1(files: Files, memory: list[str], cpu: list[str]) -> Cgroup:
    return Cgroup(
        version=1,
        memory_limit_bytes=_least(files, memory, "memory.limit_in_bytes", _limit_bytes),
        memory_used_bytes=_used(
            files, memory, current="memory.usage_in_bytes", droppable="total_inactive_file"
        ),
        oom_kills=_counter(files, memory, "memory.oom_control", "oom_kill"),
        cpu_limit_cores=_least_quota(files, cpu),
        throttled_share=_throttled(files, cpu),
    )


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
        _, mountpoint, kind, options, *_ = line.split()
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


def _limit_bytes(text: str) -> int | None:
    return None if text == "max" or int(text) >= _NO_LIMIT else int(text)


def _cores(text: str) -> float | None:
    quota, period = text.split()
    return None if quota == "max" else int(quota) / int(period)


def _used(files: Files, folders: list[str], *, current: str, droppable: str) -> int | Unknown:
    if not folders:
        return Unknown(reason="no memory cgroup is mounted")
    used = files.number(f"{folders[0]}/{current}")
    cached = _counter(files, folders, "memory.stat", droppable)
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

    def find(text: str) -> int:
        return int(dict(line.split() for line in text.splitlines())[counter])

    return files.parsed(f"{folders[0]}/{name}", find)
