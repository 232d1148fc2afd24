"""The machine and the job's processes, read from files like the kernel's."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stoker.watch.gauges.host import Host
from stoker.watch.gauges.kept import Rate
from stoker.watch.gauges.mounts import lustre_counters, nfs_counters
from stoker.watch.gauges.tasks import Tasks

NFS = """\
device proc mounted on /proc with fstype proc
device server:/data mounted on /data with fstype nfs4 statvers=1.1
\tage:\t100
\tbytes:\t1000 0 0 0 4096 512 1 1
\tper-op statistics
\t        READ: 10 10 0 1000 5000 3 70 80 0
\t       WRITE: 2 2 0 900 100 1 10 12 0
device other:/x mounted on /x with fstype nfs statvers=1.1
\tbytes:\t1 0 0 0 4 8 1 1
"""
LUSTRE = "snapshot_time 1 secs\nread_bytes 12 samples [bytes] 4096 1048576 9437184\nopen 5 samples [usecs]\n"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def machine(
    root: Path, *, busy: int, waiting: int, sectors: int, pressure_us: int, throttled_us: int
) -> None:
    """A kernel's files after some time: core 0 busy for some ticks, one disk, one group."""
    core = min(os.sched_getaffinity(0))
    write(
        root,
        {
            "proc/stat": f"cpu  1 1 1 1\ncpu{core} {busy} 0 0 {100 - busy} {waiting} 0 0 0\nintr 5\n",
            "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 400 kB\n",
            "proc/diskstats": f"8 0 sda 5 0 {sectors} 0 0 0 0 0 0 500 900\n8 1 sda1 5 0 9 0 0 0 0 0 0 1 1\n",
            "proc/net/dev": "a\nb\n lo: 9 0 0 0 0 0 0 0 9\neth0: 100 0 0 0 0 0 0 0 50 0\n",
            "proc/pressure/io": f"some avg10=0.00 total={pressure_us}\nfull avg10=0.00 total=0\n",
            "proc/self/cgroup": "0::/job\n",
            "proc/self/mounts": "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n",
            "sys/fs/cgroup/job/cpu.stat": f"usage_usec 5\nthrottled_usec {throttled_us}\n",
            "sys/fs/cgroup/job/memory.current": "2048\n",
            "sys/fs/cgroup/job/memory.max": "4096\n",
            "sys/fs/cgroup/job/memory.events": "oom 0\noom_kill 3\n",
            "sys/block/sda/size": "1\n",
            "dev/shm/x": "",
        },
    )


def test_counters_become_rates_and_shares(tmp_path: Path) -> None:
    machine(tmp_path, busy=0, waiting=0, sectors=0, pressure_us=0, throttled_us=0)
    host = Host(tmp_path)
    assert "cpu" not in host.read(10.0), "a rate needs two readings"
    machine(tmp_path, busy=80, waiting=20, sectors=2000, pressure_us=500_000, throttled_us=1_000_000)
    found = host.read(12.0)
    host.close()
    assert found["disk_read"] == 2000 * 512 / 2
    assert found["psi_io"] == pytest.approx(25.0)
    assert found["throttled"] == pytest.approx(50.0)
    assert (found["mem_total"], found["mem_avail"]) == (1000 * 1024, 400 * 1024)
    assert (found["cgroup_used"], found["cgroup_limit"], found["oom_kills"]) == (2048, 4096, 3)
    assert found["iowait"] > 0
    assert found["net_rx"] == 0


def test_the_memory_limit_of_a_group_above_is_the_one_that_kills(tmp_path: Path) -> None:
    machine(tmp_path, busy=0, waiting=0, sectors=0, pressure_us=0, throttled_us=0)
    write(tmp_path, {"sys/fs/cgroup/job/memory.max": "max\n", "sys/fs/cgroup/memory.max": "3072\n"})
    host = Host(tmp_path)
    assert host.read(1.0)["cgroup_limit"] == 3072
    host.close()


def test_a_machine_that_shows_no_groups_has_no_limit_and_no_kills(tmp_path: Path) -> None:
    host = Host(tmp_path)
    found = host.read(1.0)
    host.close()
    assert (found["oom_kills"], "cgroup_limit" in found, "cgroup_used" in found) == (0, False, False)


def test_network_filesystems_are_summed_over_their_mounts() -> None:
    assert nfs_counters(NFS) == {
        "nfs_read": 4100.0,
        "nfs_write": 520.0,
        "nfs_ops": 12.0,
        "nfs_rtt_total_ms": 80.0,
    }
    assert lustre_counters([LUSTRE]) == {"lustre_read": 9437184.0, "lustre_write": 0.0, "lustre_ops": 17.0}


def test_this_machine_can_be_read() -> None:
    host = Host()
    host.read(1.0)
    found = host.read(2.0)
    host.close()
    assert {"mem_total", "mem_avail", "shm_total", "net_rx"} <= set(found)


def test_workers_are_found_by_name_and_leave_with_their_end() -> None:
    program = (
        "import os, sys\n"
        "for name in ('pt_data_worker', 'other'):\n"
        "    if not os.fork():\n"
        "        open('/proc/self/comm', 'w').write(name)\n"
        "        os.write(1, b'ready\\n')\n"
        "        sys.stdin.read()\n"
        "        os._exit(0)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        assert [trainer.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        tasks = Tasks()
        tasks.read(1.0, [trainer.pid])
        found = tasks.read(2.0, [trainer.pid])
        states = [found[f"workers_{state}"] for state in ("running", "sleeping", "blocked")]
        assert (found["workers"], sum(states)) == (1, 1)
        assert found["trainer_cpu"] >= 0
        assert found["workers_read_calls"] >= 0
        assert tasks.read(3.0, []) == {}
        tasks.close()
        trainer.communicate("")


def test_nothing_is_kept_of_workers_that_are_gone(tmp_path: Path) -> None:
    """Loaders without persistent workers have new ones in every epoch of a month."""
    trainer, tasks, left = tmp_path / "1/task/1", Tasks(tmp_path), []
    trainer.mkdir(parents=True)
    for pid in range(2, 12):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (pt_data_worker) S " + "1 " * 20)
        (trainer / "children").write_text(f"{pid}")
        assert tasks.read(float(pid), [1])["workers"] == 1
        if pid in (4, 11):
            left.append(sum(type(one) is Rate for one in gc.get_objects()))
    tasks.close()
    assert left[0] == left[1]
    assert "_rate" not in vars(tasks)
