"""A disk of a given speed: the kernel holds this process's reads back (cgroups, version 1 or 2; needs root).

A virtual disk is often as fast as its host's memory, which says little about a loader's behaviour on a disk
that is what it waits for.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@contextmanager
def slow_disk(folder: Path, gb_s: float) -> Iterator[None]:
    """Within, the disk that holds `folder` gives this process so many GB/s. PermissionError or OSError where
    the kernel does not let us."""
    is_old = (_CGROUPS / "blkio").is_dir()
    root = _CGROUPS / "blkio" if is_old else _CGROUPS
    group, limit = root / f"slow-disk-{os.getpid()}", int(gb_s * 1e9)
    if not is_old:
        (root / "cgroup.subtree_control").write_text("+io")
    group.mkdir()
    try:
        if is_old:
            (group / "blkio.throttle.read_bps_device").write_text(f"{_disk_of(folder)} {limit}")
        else:
            (group / "io.max").write_text(f"{_disk_of(folder)} rbps={limit}")
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _disk_of(folder: Path) -> str:
    """The number of the whole disk: a partition cannot be limited."""
    number = folder.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
    whole = device.parent if (device / "partition").exists() else device
    return (whole / "dev").read_text().strip()
