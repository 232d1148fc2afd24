"""Resource limits: the cores and the memory this process may use, of the machine's and of its container's."""

from __future__ import annotations

import os

from stoker.machine.cgroup import read_cgroup
from stoker.machine.files import Files
from stoker.machine.host import read_memory


def usable_cores(files: Files | None = None) -> int:
    """Cores this process may use: under taskset or a container's quota that is not all of them."""
    cores = len(os.sched_getaffinity(0))
    quota = read_cgroup(files or Files()).cpu_limit_cores
    return min(cores, max(1, int(quota))) if isinstance(quota, (int, float)) else cores


def free_bytes(files: Files | None = None) -> int:
    """Memory this process may still take."""
    files = files or Files()
    memory, group = read_memory(files), read_cgroup(files)
    free = [memory.available_bytes] if isinstance(memory.available_bytes, int) else [0]
    if isinstance(group.memory_limit_bytes, int) and isinstance(group.memory_used_bytes, int):
        free.append(group.memory_limit_bytes - group.memory_used_bytes)
    return max(0, min(free))
