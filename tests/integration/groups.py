"""A cgroup of the test's own, of whichever version this machine has."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

CGROUP = Path("/sys/fs/cgroup")


@contextmanager
def cgroup(*, memory_bytes: int, cores: float) -> Iterator[tuple[str, ...]]:
    """What to put before a command so that it runs in a cgroup with these limits."""
    name, quota = f"stoker-test-{os.getpid()}", str(int(cores * 100_000))
    if (CGROUP / "cgroup.controllers").exists():
        (CGROUP / "cgroup.subtree_control").write_text("+memory +cpu")
        limits = {
            CGROUP / name / "memory.max": str(memory_bytes),
            CGROUP / name / "cpu.max": f"{quota} 100000",
        }
    else:
        limits = {
            CGROUP / "memory" / name / "memory.limit_in_bytes": str(memory_bytes),
            CGROUP / "cpu" / name / "cpu.cfs_quota_us": quota,
        }
    folders = list(dict.fromkeys(path.parent for path in limits))
    try:
        for folder in folders:
            folder.mkdir()
        for path, text in limits.items():
            path.write_text(text)
        enter = "; ".join(f"echo $$ > {folder}/cgroup.procs" for folder in folders)
        yield ("sh", "-c", f'set -e; {enter}; exec "$@"', "sh")
    finally:
        for folder in filter(Path.exists, folders):
            folder.rmdir()
