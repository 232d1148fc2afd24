"""The cgroup this job lives in, version 1 or 2: CPU quota and throttling, memory and its limit, OOM kills."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from stoker.observe.kept import Kept

_NO_LIMIT = 1 << 60  # version 1 says "none" with a number near 2**63


class Cgroup:
    """Reads one group; a file that is not there gives no column."""

    def __init__(self, *, cpu: Path, memory: Path, version: int) -> None:
        self._version = version
        used, limit = ("memory.current", "memory.max") if version == 2 else _V1_MEMORY
        self._cpu_stat = Kept(cpu / "cpu.stat")
        self._used, self._limit = Kept(memory / used), Kept(memory / limit)
        self._ooms = Kept(memory / ("memory.events" if version == 2 else "memory.oom_control"))
        self._quota = cpu

    @classmethod
    def here(cls, root: Path = Path("/")) -> Cgroup:
        """The group of this process; inside a container its files stand at the mount itself."""
        mount, lines = root / "sys/fs/cgroup", []
        with suppress(OSError):
            lines = (root / "proc/self/cgroup").read_text().split()
        paths = {line.split(":", 2)[1]: line.split(":", 2)[2].lstrip("/") for line in lines}
        if (mount / "cgroup.controllers").exists():
            own = _existing(mount, paths.get("", ""), "cgroup.events")
            return cls(cpu=own, memory=own, version=2)
        cpu = _existing(mount / "cpu", paths.get("cpu", paths.get("cpu,cpuacct", "")), "cpu.stat")
        memory = _existing(mount / "memory", paths.get("memory", ""), "memory.usage_in_bytes")
        return cls(cpu=cpu, memory=memory, version=1)

    def quota_cores(self) -> float | None:
        """Cores' worth of time the group may use, None where it is not limited."""
        with suppress(OSError, ValueError):
            if self._version == 2:
                quota, period = (self._quota / "cpu.max").read_text().split()
            else:
                quota = (self._quota / "cpu.cfs_quota_us").read_text().strip()
                period = (self._quota / "cpu.cfs_period_us").read_text()
            if quota not in ("max", "-1"):
                return int(quota) / int(period)
        return None

    def counters(self) -> dict[str, float]:
        """Seconds in which the quota held tasks back."""
        for line in self._cpu_stat.read().split("\n"):
            name, _, value = line.partition(" ")
            if name in ("throttled_usec", "throttled_time"):
                return {"throttled": int(value) / (1e6 if name == "throttled_usec" else 1e9)}
        return {}

    def read(self) -> dict[str, float]:
        found: dict[str, float] = {"oom_kills": self.oom_kills()}
        used, limit = self._used.read().strip(), self._limit.read().strip()
        if used.isdigit():
            found["cgroup_used"] = int(used)
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            found["cgroup_limit"] = int(limit)
        return found

    def oom_kills(self) -> int:
        for line in self._ooms.read().split("\n"):
            name, _, value = line.partition(" ")
            if name == "oom_kill":
                return int(value)
        return 0

    def close(self) -> None:
        for one in (self._cpu_stat, self._used, self._limit, self._ooms):
            one.close()


_V1_MEMORY = ("memory.usage_in_bytes", "memory.limit_in_bytes")


def _existing(mount: Path, path: str, probe: str) -> Path:
    """The group's folder, or the mount where the container does not see its own path."""
    return mount / path if (mount / path / probe).exists() else mount
