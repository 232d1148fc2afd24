"""cgroup metrics of a job: CPU throttling, memory and its limit, OOM kills."""

from __future__ import annotations

from collections.abc import Sequence

from stoker.machine.cgroup import Groups, counters_of, find_groups, limit_of
from stoker.machine.files import Files
from stoker.watch.gauges.kept import Kept

_NO_GROUPS = Groups(version=2, memory=[], cpu=[], pids=[])


class Cgroup:
    """Reads one group; a file that is not there gives no column."""

    def __init__(self, files: Files, *, process: str = "self") -> None:
        found = find_groups(files, process=process)
        groups = found if isinstance(found, Groups) else _NO_GROUPS

        def kept(folders: Sequence[str], name: str) -> list[Kept]:
            return [Kept(files.at(f"{folder}/{name}")) for folder in folders]

        self._cpu_stat = kept(groups.cpu[:1], "cpu.stat")
        self._used = kept(groups.memory[:1], groups.names.used)
        self._limits = kept(groups.memory, groups.names.limit)  # the least of them holds
        self._ooms = kept(groups.memory[:1], groups.names.ooms)

    def counters(self) -> dict[str, float]:
        """Seconds in which the quota held tasks back."""
        for name, value in _counted(self._cpu_stat).items():
            if name in ("throttled_usec", "throttled_time"):
                return {"throttled": value / (1e6 if name == "throttled_usec" else 1e9)}
        return {}

    def read(self) -> dict[str, float]:
        used = [int(text) for text in _texts(self._used) if text.isdigit()]
        said = [limit_of(text) for text in _texts(self._limits) if text.isdigit()]
        limits = [limit for limit in said if limit is not None]
        return {
            "oom_kills": _counted(self._ooms).get("oom_kill", 0),
            **({"cgroup_used": used[0]} if used else {}),
            **({"cgroup_limit": min(limits)} if limits else {}),
        }

    def close(self) -> None:
        for one in (*self._cpu_stat, *self._used, *self._limits, *self._ooms):
            one.close()


def _texts(files: list[Kept]) -> list[str]:
    return [kept.read().strip() for kept in files]


def _counted(files: list[Kept]) -> dict[str, int]:
    return counters_of("\n".join(_texts(files)))
