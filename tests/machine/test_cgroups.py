"""cgroup v1 and v2, as the kernel lays their files out."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from stoker.machine.allowed import free_bytes, usable_cores
from stoker.machine.cgroup import read_cgroup
from stoker.machine.files import Files
from stoker.machine.plain import Unknown

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


def lay(root: Path, files: dict[str, str]) -> Files:
    for name, text in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return Files(root)


V2_MOUNT = {"/proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0"}
V1_MOUNTS = {
    "/proc/self/mounts": "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0"
}


def test_a_pod_sees_its_limits_at_the_root(tmp_path: Path) -> None:
    """A container with a cgroup namespace: its own group is the root."""
    files = lay(
        tmp_path,
        V2_MOUNT
        | {
            "/proc/self/cgroup": "0::/",
            "/sys/fs/cgroup/memory.max": str(100 * GIB),
            "/sys/fs/cgroup/memory.current": str(50 * GIB),
            "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {30 * GIB}",
            "/sys/fs/cgroup/memory.events": "low 0\noom 3\noom_kill 2",
            "/sys/fs/cgroup/cpu.max": "800000 100000",
            "/sys/fs/cgroup/cpu.stat": "usage_usec 5\nnr_periods 200\nnr_throttled 50",
        },
    )
    found = read_cgroup(files)
    assert (found.version, found.memory_limit_bytes, found.cpu_limit_cores) == (2, 100 * GIB, 8.0)
    assert (found.memory_used_bytes, found.oom_kills, found.throttled_share) == (20 * GIB, 2, 0.25)


def test_the_least_limit_of_the_groups_above_holds(tmp_path: Path) -> None:
    files = lay(
        tmp_path,
        V2_MOUNT
        | {
            "/proc/self/cgroup": "0::/system.slice/job/step",
            "/sys/fs/cgroup/system.slice/memory.max": str(64 * GIB),
            "/sys/fs/cgroup/system.slice/cpu.max": "max 100000",
            "/sys/fs/cgroup/system.slice/job/memory.max": "max",
            "/sys/fs/cgroup/system.slice/job/cpu.max": "150000 100000",
            "/sys/fs/cgroup/system.slice/job/step/memory.max": str(80 * GIB),
        },
    )
    found = read_cgroup(files)
    assert (found.memory_limit_bytes, found.cpu_limit_cores) == (64 * GIB, 1.5)


def test_no_limit_is_none_and_not_unknown(tmp_path: Path) -> None:
    """The root group of a bare machine has no such files."""
    files = lay(tmp_path, V2_MOUNT | {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cgroup.procs": "1"})
    assert (read_cgroup(files).memory_limit_bytes, read_cgroup(files).cpu_limit_cores) == (None, None)


def test_version_one_has_a_folder_for_each_controller(tmp_path: Path) -> None:
    files = lay(
        tmp_path,
        V1_MOUNTS
        | {
            "/proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n0::/",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "/sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": str(16 * GIB),
            "/sys/fs/cgroup/memory/docker/abc/memory.oom_control": "oom_kill_disable 0\noom_kill 1",
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "250000",
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
    )
    found = read_cgroup(files)
    assert (found.version, found.memory_limit_bytes) == (1, 16 * GIB)
    assert (found.cpu_limit_cores, found.oom_kills) == (2.5, 1)


def test_a_container_that_sees_a_path_of_the_host_takes_the_root(tmp_path: Path) -> None:
    files = lay(
        tmp_path,
        V1_MOUNTS
        | {
            "/proc/self/cgroup": "4:memory:/kubepods/pod1\n1:cpu,cpuacct:/kubepods/pod1",
            "/sys/fs/cgroup/memory/memory.limit_in_bytes": str(8 * GIB),
            "/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
        },
    )
    assert (read_cgroup(files).memory_limit_bytes, read_cgroup(files).cpu_limit_cores) == (8 * GIB, None)


@pytest.mark.parametrize("files", [{}, {"/proc/self/cgroup": "0::/"}], ids=["no proc", "no mounts"])
def test_without_proc_everything_is_unknown(files: dict[str, str], tmp_path: Path) -> None:
    assert isinstance(read_cgroup(lay(tmp_path, files)).memory_limit_bytes, Unknown)


@pytest.mark.parametrize(("limit", "free"), [("max", 9 * GIB), (str(4 * GIB), 3 * GIB), (str(GIB // 2), 0)])
def test_free_is_what_machine_and_container_both_have(limit: str, free: int, tmp_path: Path) -> None:
    files = lay(
        tmp_path,
        V2_MOUNT
        | {
            "/proc/self/cgroup": "0::/",
            "/proc/meminfo": f"MemTotal: {16 * GIB >> 10} kB\nMemAvailable: {9 * GIB >> 10} kB",
            "/sys/fs/cgroup/memory.max": limit,
            "/sys/fs/cgroup/memory.current": str(GIB),
            "/sys/fs/cgroup/memory.stat": "inactive_file 0",
        },
    )
    assert free_bytes(files) == free


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("9900000 10", None)],
)
def test_a_quota_of_the_container_limits_the_cores(quota: str, cores: int | None, tmp_path: Path) -> None:
    files = lay(tmp_path, V2_MOUNT | {"/proc/self/cgroup": "0::/", "/sys/fs/cgroup/cpu.max": quota})
    assert usable_cores(files) == (cores or usable_cores(Files(tmp_path / "none")))


def test_the_quota_of_a_job_step_or_of_version_one_limits_the_cores_too(tmp_path: Path) -> None:
    """Where no namespace hides the groups above, the root has no quota; version 1 has no cpu.max at all."""
    step = lay(
        tmp_path / "two",
        V2_MOUNT | {"/proc/self/cgroup": "0::/job/step", "/sys/fs/cgroup/job/step/cpu.max": "100000 100000"},
    )
    docker = lay(
        tmp_path / "one",
        V1_MOUNTS
        | {
            "/proc/self/cgroup": "4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc",
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "100000",
            "/sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "100000",
        },
    )
    assert (usable_cores(step), usable_cores(docker)) == (1, 1)
