"""The gate: machines a job must not start on, and machines that are good enough."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import GIB, machine, seen

from stoker.doctor.need import Need
from stoker.machine.snapshot import Cgroup, Limits, Nic, Place, Snapshot

GOOD = machine("good_node")
CACHE = next(place for place in GOOD.places if place.role == "cache")
ETHERNET, RDMA = Nic(name="eth0", up=True), Nic(name="mlx5_0", rdma=True, up=True)


def with_cache(**changes: object) -> Snapshot:
    return replace(GOOD, places=(replace(CACHE, **changes),))


def level(snapshot: Snapshot, check: str, need: Need | None = None) -> str:
    (result,) = seen(snapshot, check, need)
    return result.level


@pytest.mark.parametrize(("nics", "wanted"), [((ETHERNET,), "ok"), ((ETHERNET, RDMA), "fail")])
def test_locked_memory_is_for_rdma_alone(nics: tuple[Nic, ...], wanted: str) -> None:
    little = Limits(memlock_soft_bytes=64 << 10, memlock_hard_bytes=64 << 10, may_lock_any=False)
    node = replace(GOOD, limits=little, nics=nics)
    assert level(node, "locked memory", Need(memlock_bytes=8 * GIB)) == wanted


@pytest.mark.parametrize(("hard", "wanted"), [(1_048_576, "warn"), (1024, "fail")])
def test_open_files_that_the_job_can_raise_itself_do_not_stop_it(hard: int, wanted: str) -> None:
    node = replace(GOOD, limits=Limits(open_files_soft=1024, open_files_hard=hard))
    assert level(node, "open files", Need(open_files=5000)) == wanted


@pytest.mark.parametrize(
    ("changes", "check"),
    [
        ({"options": ("ro", "noatime")}, "writable cache"),
        ({"writable": False}, "writable cache"),
        ({"broken_link": True}, "writable cache"),
        ({"free_bytes": 1 << 20, "held_bytes": 0}, "free space"),
        ({"free_inodes": 3, "total_inodes": 1_000_000}, "free inodes"),
    ],
)
def test_a_cache_that_can_take_nothing_fails(changes: dict[str, object], check: str) -> None:
    assert level(with_cache(**changes), check) == "fail"
    assert level(with_cache(), check) == "ok"


def test_a_full_cache_that_holds_the_jobs_data_is_good() -> None:
    full = with_cache(free_bytes=1 << 20, held_bytes=2000 * GIB)
    assert level(full, "free space", Need(cache_bytes=1999 * GIB)) == "warn"


def test_seven_cards_of_eight_fail() -> None:
    cards = GOOD.gpus
    assert isinstance(cards, tuple)
    assert level(GOOD, "GPUs", Need(gpus=len(cards))) == "ok"
    assert level(replace(GOOD, gpus=cards[1:]), "GPUs", Need(gpus=len(cards))) == "fail"


@pytest.mark.parametrize("disk", ["rbd0", "nbd3", "drbd1"])
def test_a_disk_behind_the_network_is_no_nvme(disk: str) -> None:
    assert level(with_cache(disk=disk, source=f"/dev/{disk}"), "cache on NVMe") == "warn"


@pytest.mark.parametrize("option", ["acregmax=0", "acdirmax=0", "actimeo=0", "actimeo=3"])
def test_attributes_cached_for_no_time_are_told(option: str) -> None:
    nfs = Place(
        role="data", path="/mnt", mountpoint="/mnt", source="h:/x", filesystem="nfs4", options=("rw", option)
    )
    assert level(replace(GOOD, places=(nfs,)), "NFS caching") == "warn"


@pytest.mark.parametrize(
    ("log", "wanted"),
    [
        ("NVRM: Xid (PCI:0000:18:00): 154, GPU recovery action changed", "fail"),
        ("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus", "fail"),
        ("[864000 s ago] NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus", "warn"),
        ("[60 s ago] NVRM: Xid (PCI:0000:18:00): 63, Row Remapper: remapped", "warn"),
        ("[60 s ago] NVRM: Xid (PCI:0000:18:00): 13, Graphics Exception", "warn"),
    ],
)
def test_an_xid_counts_by_what_it_means_and_by_its_age(log: str, wanted: str) -> None:
    (result,) = seen(replace(GOOD, log=(log,)), "GPU errors")
    assert result.level == wanted
    assert ("10 d ago" in result.seen.read) == ("864000" in log)


def test_a_kill_for_memory_counts_once() -> None:
    log = (
        "[60 s ago] oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=7",
        "[60 s ago] Memory cgroup out of memory: Killed process 7 (python)",
    )
    node = replace(GOOD, log=log, cgroup=Cgroup(oom_kills=0))
    assert "1 kill for memory" in seen(node, "memory kills")[0].seen.read


def test_the_threads_a_quota_advises_are_what_the_check_of_threads_wants() -> None:
    tight = replace(GOOD, cgroup=Cgroup(cpu_limit_cores=16.0))
    (result,) = seen(tight, "CPU quota")
    variable, _, value = result.seen.fix[0].removeprefix("export ").partition("=")
    assert level(replace(tight, environ={variable: value}), "OMP variables") == "ok"
    assert level(replace(tight, environ={variable: "16"}), "OMP variables") == "warn"


def test_stripes_follow_the_plan() -> None:
    lustre = next(place for place in machine("lustre_slurm").places if place.filesystem == "lustre")
    one = replace(GOOD, places=(replace(lustre, role="data", stripes=1, stripe_bytes=4 << 20),))
    assert level(one, "Lustre stripes", Need(stripes=1)) == "ok"
    (result,) = seen(one, "Lustre stripes", Need(stripes=4))
    assert "lfs setstripe -c 4" in result.seen.fix[0]
    assert "lfs setstripe -c 8" in seen(one, "Lustre stripes")[0].seen.fix[0]
