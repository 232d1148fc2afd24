"""Machines as they are found: one core, a CPU quota, busy neighbours, a slow disk, a tiny /dev/shm.

Each is a context manager that yields words to put before a command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

Words = list[str]


@contextmanager
def plain(folder: Path) -> Iterator[Words]:
    yield []


@contextmanager
def one_core(folder: Path) -> Iterator[Words]:
    yield ["taskset", "-c", str(min(os.sched_getaffinity(0)))]


@contextmanager
def busy_neighbours(folder: Path) -> Iterator[Words]:
    """Twice as many processes that never rest as there are cores."""
    count = 2 * len(os.sched_getaffinity(0))
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield []
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@contextmanager
def half_a_core(folder: Path) -> Iterator[Words]:
    """A CPU quota of half a core. Needs root and a cgroup file system that may be written."""
    with _cgroup("cpu", "cpu.cfs_quota_us", "50000", "cpu.max", "50000 100000") as words:
        yield words


@contextmanager
def slow_disk(folder: Path) -> Iterator[Words]:
    """8 MB/s to read from the disk that holds the folder."""
    device = os.stat(folder).st_dev
    disk = f"{os.major(device)}:{os.minor(device)}"
    limit = "8000000"
    v1 = ("blkio.throttle.read_bps_device", f"{disk} {limit}")
    with _cgroup("blkio", *v1, "io.max", f"{disk} rbps={limit}") as words:
        yield words


@contextmanager
def tiny_shm(folder: Path) -> Iterator[Words]:
    """24 MiB of /dev/shm, in a mount namespace of its own. Needs root."""
    mount = 'mount -t tmpfs -o size=24m tmpfs /dev/shm && exec "$@"'
    yield ["unshare", "--mount", "--propagation", "private", "sh", "-c", mount, "sh"]


@contextmanager
def _cgroup(controller: str, v1_file: str, v1: str, v2_file: str, v2: str) -> Iterator[Words]:
    base = Path("/sys/fs/cgroup")
    old = (base / controller / "cgroup.procs").exists()
    group = (base / controller if old else base) / f"stoker-scenario-{os.getpid()}"
    group.mkdir()
    try:
        (group / (v1_file if old else v2_file)).write_text(v1 if old else v2)
        yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
    finally:
        group.rmdir()


NEED_ROOT = (slow_disk, half_a_core, tiny_shm)  # cgroups and mounts
