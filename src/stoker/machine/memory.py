"""How much memory a process may still take: of the machine's, and of its container's."""

from __future__ import annotations

from stoker.machine.cgroup import read_cgroup
from stoker.machine.files import Files
from stoker.machine.host import read_memory


def free_bytes(files: Files) -> int:
    memory, group = read_memory(files), read_cgroup(files)
    free = [memory.available_bytes] if isinstance(memory.available_bytes, int) else [0]
    if isinstance(group.memory_limit_bytes, int) and isinstance(group.memory_used_bytes, int):
        free.append(group.memory_limit_bytes - group.memory_used_bytes)
    return max(0, min(free))
