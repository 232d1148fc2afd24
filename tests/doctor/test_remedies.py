"""Remedies keep what they are not about."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import machine, seen

from stoker.machine.snapshot import UNLIMITED, Limits, Place, Snapshot, Surroundings

NODE = replace(machine("good_node"), surroundings=Surroundings(container=None, kubernetes=False, slurm=False))


def fixes(snapshot: Snapshot, check: str) -> tuple[str, ...]:
    (result,) = seen(snapshot, check)
    assert result.level in ("warn", "fail")
    return result.seen.fix


def mounted(*options: str, filesystem: str = "nfs4") -> Snapshot:
    place = Place(
        role="data",
        path="/mnt/x",
        mountpoint="/mnt/x",
        source="host:/x",
        filesystem=filesystem,
        options=options,
    )
    return replace(NODE, places=(place,))


@pytest.mark.parametrize(
    "kept", ["sec=krb5p", "ro", "vers=4.2", "proto=tcp", "port=2049", "nosuid", "local_lock=none"]
)
def test_a_new_nfs_mount_keeps_what_the_old_one_was_made_with(kept: str) -> None:
    (line,) = fixes(
        mounted(kept, "rsize=65536", "wsize=65536", "relatime", "addr=10.0.0.1"), "NFS transfer size"
    )
    options = line.partition(" -o ")[2].split()[0].split(",")
    assert kept in options
    assert not {"relatime", "rsize=65536", "addr=10.0.0.1"} & set(options)
    assert {"noatime", "rsize=1048576", "hard"} <= set(options)


def test_limits_are_for_root_too_and_each_has_its_file() -> None:
    low = Limits(
        memlock_soft_bytes=1, memlock_hard_bytes=1, may_lock_any=False, open_files_soft=10, open_files_hard=10
    )
    (memory,), (files,) = (
        fixes(replace(NODE, limits=low), check) for check in ("locked memory", "open files")
    )
    assert "'* - memlock unlimited' 'root - memlock unlimited'" in memory
    written = [line.partition(" > ")[2].split()[0] for line in (memory, files)]
    assert len(set(written)) == 2
    assert UNLIMITED == -1


def test_kernel_settings_are_each_in_a_file_of_their_own() -> None:
    memory = replace(NODE.memory, swap_total_bytes=1, swap_used_bytes=0, swappiness=60, zone_reclaim=1)
    cpu = replace(NODE.cpu, numa_balancing=1)
    node = replace(NODE, memory=memory, cpu=cpu)
    lines = [*fixes(node, "swap"), *fixes(node, "zone reclaim"), *fixes(node, "NUMA balancing")]
    assert len({line.rpartition(" > ")[2] for line in lines}) == 3


def test_a_mount_that_is_no_longer_synchronous_keeps_its_other_options() -> None:
    node = mounted("rw", "noatime", "dirsync", "data=ordered", filesystem="ext4")
    assert fixes(node, "synchronous writes") == (
        "umount /mnt/x && mount -t ext4 -o rw,noatime,data=ordered host:/x /mnt/x",
    )
