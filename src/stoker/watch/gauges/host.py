"""Host metrics: one reading of cores, pressure (PSI), disks, network, memory, shared memory.

`Host.read` costs some 0.3 ms on two cores: files are kept open, and nothing is listed twice.
"""

from __future__ import annotations

import os
from pathlib import Path

from stoker.machine.files import Files
from stoker.machine.host import meminfo_of, shm_of
from stoker.machine.places import disk_names
from stoker.watch.gauges.cgroup import Cgroup
from stoker.watch.gauges.kept import Kept, Rate
from stoker.watch.gauges.mounts import Mounts

_SECTOR = 512
Readings = dict[str, float]


class Host:
    """Reads /proc and /sys of this machine; one thread."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._stat, self._meminfo = Kept(root / "proc/stat"), Kept(root / "proc/meminfo")
        self._disks, self._net = Kept(root / "proc/diskstats"), Kept(root / "proc/net/dev")
        self._pressure = {name: Kept(root / f"proc/pressure/{name}") for name in ("cpu", "io", "memory")}
        self._files = files = Files(root)
        self._whole_disks = set(disk_names(files))
        self._cores = os.sched_getaffinity(0)
        self._cgroup, self._mounts = Cgroup(files), Mounts(root)
        self._shm = files  # whose /dev/shm is read
        self._rate = Rate()
        self._ticks: dict[int, tuple[int, int, int]] = {}

    def follow(self, pid: int) -> None:
        """From now on read what holds for this process where it differs from us: its cgroup, the cores it may
        use, its /dev/shm. A command may start its job in a container, or in a step of its own."""
        self._cgroup.close()
        self._cgroup = Cgroup(self._files, process=str(pid))
        self._cores = os.sched_getaffinity(pid)
        self._shm = (
            Files(self._files.at(f"/proc/{pid}/root")) if _other_mounts(self._files, pid) else self._files
        )

    def read(self, t: float) -> Readings:
        """All columns of docs/concepts/recording.md but those of processes."""
        rates = self._rate.per_second(t, self._counters())
        return {
            **self._cpu(),
            **_in_percent(rates, "psi_cpu", "psi_io", "psi_memory", "throttled"),
            **_disk_columns(rates),
            **self._mounts.read(t),
            **self._memory(),
            **self._cgroup.read(),
        }

    def close(self) -> None:
        for kept in (self._stat, self._meminfo, self._disks, self._net, *self._pressure.values()):
            kept.close()
        self._cgroup.close()
        self._mounts.close()

    def _counters(self) -> Readings:
        return {
            **self._disk_counters(),
            **self._net_counters(),
            **self._pressure_counters(),
            **self._cgroup.counters(),
        }

    def _cpu(self) -> Readings:
        """Busy share of each allowed core since the reading before."""
        found: Readings = {}
        waits = []
        for line in self._stat.read().split("\n"):
            if not line.startswith("cpu"):
                break
            name, *fields = line.split()
            if name == "cpu" or int(name[3:]) not in self._cores:
                continue
            core, ticks = int(name[3:]), [int(field) for field in fields[:8]]
            now = (sum(ticks), ticks[3] + ticks[4], ticks[4])
            whole, idle, wait = (a - b for a, b in zip(now, self._ticks.get(core, now), strict=True))
            self._ticks[core] = now
            if whole > 0:
                found[f"core.{core}"] = 100 * (1 - idle / whole)
                waits.append(100 * wait / whole)
        if not found:
            return {}
        busy = list(found.values())
        means = {"cpu": sum(busy) / len(busy), "cpu_max": max(busy), "iowait": sum(waits) / len(waits)}
        return {**means, **found}

    def _pressure_counters(self) -> Readings:
        """Microseconds in which some task waited."""
        found = {}
        for name, kept in self._pressure.items():
            _, total, value = kept.read().partition("\n")[0].rpartition("total=")
            if total:
                found[f"psi_{name}"] = int(value) / 1e6
        return found

    def _disk_counters(self) -> Readings:
        sums = dict.fromkeys(("disk_reads", "disk_read", "disk_writes", "disk_write", "disk_queue"), 0.0)
        busy = {}
        for line in self._disks.read().split("\n"):
            fields = line.split()
            if len(fields) < 14 or fields[2] not in self._whole_disks:
                continue
            numbers = [int(field) for field in fields[3:14]]
            sums["disk_reads"] += numbers[0]
            sums["disk_read"] += numbers[2] * _SECTOR
            sums["disk_writes"] += numbers[4]
            sums["disk_write"] += numbers[6] * _SECTOR
            sums["disk_queue"] += numbers[10] / 1e3  # request-seconds
            busy[f"busy.{fields[2]}"] = numbers[9] / 1e3
        return {**sums, **busy} if busy else {}

    def _net_counters(self) -> Readings:
        received = sent = 0
        for line in self._net.read().split("\n")[2:]:
            name, _, fields = line.partition(":")
            if fields and name.strip() != "lo":
                numbers = fields.split()
                received, sent = received + int(numbers[0]), sent + int(numbers[8])
        return {"net_rx": received, "net_tx": sent}

    def _memory(self) -> Readings:
        info = meminfo_of(self._meminfo.read())
        total, used = shm_of(self._shm)
        said = (info.get("MemTotal"), info.get("MemAvailable"), total, used)
        named = zip(("mem_total", "mem_avail", "shm_total", "shm_used"), said, strict=True)
        return {name: value for name, value in named if isinstance(value, int)}


def _other_mounts(files: Files, pid: int) -> bool:
    try:
        ours, theirs = (os.readlink(files.at(f"/proc/{process}/ns/mnt")) for process in ("self", pid))
    except OSError:  # another user's: what it sees is not ours to read
        return False
    return ours != theirs


def _in_percent(rates: Readings, *names: str) -> Readings:
    """Seconds a second as percent."""
    return {name: 100 * rates[name] for name in names if name in rates}


def _disk_columns(rates: Readings) -> Readings:
    plain = {name: rate for name, rate in rates.items() if name.startswith(("disk_", "net_"))}
    busy = [rate for name, rate in rates.items() if name.startswith("busy.")]
    return {**plain, "disk_busy": 100 * max(busy)} if busy else plain
