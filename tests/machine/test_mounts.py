"""What folders lie on: mounts, NFS statistics, Lustre stripes, as the kernel and its tools write them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from stoker.machine.files import Files, chosen, cpu_list
from stoker.machine.mounts import mounts_of, nfs_of
from stoker.machine.places import hub_folder, read_disks, read_place, stripes_of, within

MOUNTINFO = r"""
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw,errors=remount-ro
40 22 0:45 / /mnt/my\040data rw,noatime shared:9 master:3 - nfs4 10.0.0.1:/my\040data rw,vers=4.2,rsize=65536
""".strip()

# From a kernel of 6.1, with the counters of two operations.
MOUNTSTATS = """
device proc mounted on /proc with fstype proc
device 10.0.0.1:/export mounted on /mnt/corpus with fstype nfs4 statvers=1.1
\topts:\trw,vers=4.2,rsize=65536,wsize=65536,namlen=255,acregmin=3,acregmax=60,acdirmin=30,acdirmax=60,soft,proto=tcp
\tage:\t812
\tcaps:\tcaps=0xffffff,wtmult=512,dtsize=1048576,bsize=0,namlen=255
\tsec:\tflavor=1,pseudoflavor=1
\tevents:\t1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27
\tbytes:\t1 2 3 4 5 6 7 8
\tRPC iostats version: 1.1  p/v: 100003/4 (nfs)
\txprt:\ttcp 0 0 1 0 0 90 90 0 90 0 2 0 0
\tper-op statistics
\t        NULL: 0 0 0 0 0 0 0 0 0
\t        READ: 80 84 0 19200 5242880 10 500 520 0
\t     GETATTR: 20 21 0 4000 4800 0 10 12 0
device tmpfs mounted on /run with fstype tmpfs
"""

LFS = """
(Default) /lustre/corpus
stripe_count:  8 stripe_size:   4194304 pattern:       raid0 stripe_offset: -1
"""


def test_a_mount_has_its_own_options_and_those_of_its_filesystem() -> None:
    root, data = mounts_of(MOUNTINFO)
    assert (root.device, root.filesystem, "errors=remount-ro" in root.options) == ("254:0", "ext4", True)
    assert (data.mountpoint, data.source) == ("/mnt/my data", "10.0.0.1:/my data")
    assert {"noatime", "rsize=65536"} <= set(data.options)


def test_nfs_statistics_tell_options_in_force_and_repeats() -> None:
    (found,) = nfs_of(MOUNTSTATS)
    assert found.mountpoint == "/mnt/corpus"
    assert {"soft", "wsize=65536", "acregmax=60"} <= set(found.options)
    assert found.resent_share == pytest.approx(0.05)


def test_stripes_are_read_as_lfs_writes_them() -> None:
    assert stripes_of(LFS) == (8, 4 << 20)


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    there, missing = (read_place(Files(), "cache", path) for path in (tmp_path, tmp_path / "a" / "b"))
    assert (there.exists, missing.exists) == (True, False)
    assert (there.mountpoint, there.disk) == (missing.mountpoint, missing.disk)


@pytest.mark.parametrize("target", ["nowhere", "link"])  # not there, or a circle
def test_a_link_that_leads_nowhere_is_no_folder_to_be_made(target: str, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / target)
    (tmp_path / "good").symlink_to(tmp_path)
    paths = [tmp_path / name for name in ("link", "link/cache", "good", "good/cache")]
    assert [read_place(Files(), "cache", path).broken_link for path in paths] == [True, True, False, False]


def test_the_disk_of_a_partition_is_the_whole_disk(tmp_path: Path) -> None:
    """sysfs, laid out as it is: a partition's folder lies in its disk's, and is linked by number."""
    disk = tmp_path / "sys" / "devices" / "pci" / "nvme0n1"
    (disk / "nvme0n1p2").mkdir(parents=True)
    (disk / "nvme0n1p2" / "partition").write_text("2\n")
    (tmp_path / "sys" / "dev" / "block").mkdir(parents=True)
    (tmp_path / "sys" / "dev" / "block" / "259:2").symlink_to(disk / "nvme0n1p2")
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text("22 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw\n")
    assert read_place(Files(tmp_path), "root", Path("/")).disk == "nvme0n1"


def test_the_disk_of_a_btrfs_is_told_by_its_source(tmp_path: Path) -> None:
    disk = tmp_path / "sys" / "devices" / "pci" / "nvme1n1"
    disk.mkdir(parents=True)
    (tmp_path / "sys" / "class" / "block").mkdir(parents=True)
    (tmp_path / "sys" / "class" / "block" / "nvme1n1").symlink_to(disk)
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "mountinfo").write_text("22 1 0:31 / / rw - btrfs /dev/nvme1n1 rw\n")
    assert read_place(Files(tmp_path), "root", Path("/")).disk == "nvme1n1"


def test_loops_and_memory_disks_are_no_disks(tmp_path: Path) -> None:
    for name in ("loop0", "zram0", "nvme0n1", "sda"):
        (tmp_path / "sys" / "block" / name / "queue").mkdir(parents=True)
        (tmp_path / "sys" / "block" / name / "queue" / "scheduler").write_text("[none] mq-deadline\n")
    disks = read_disks(Files(tmp_path))
    assert isinstance(disks, tuple)
    assert [(disk.name, disk.scheduler) for disk in disks] == [("nvme0n1", "none"), ("sda", "none")]


def test_who_does_not_answer_is_not_waited_for() -> None:
    never = threading.Event()
    assert within(0.01, never.wait) is None
    never.set()


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({}, "/home/ada/.cache/huggingface"),
        ({"HF_HOME": "/nvme/hf"}, "/nvme/hf"),
        ({"HF_HOME": "/nvme/hf", "HF_HUB_CACHE": "/nvme/hub"}, "/nvme/hub"),
    ],
)
def test_the_hub_cache_is_where_its_libraries_put_it(environ: dict[str, str], wanted: str) -> None:
    assert hub_folder(environ, home=Path("/home/ada")) == Path(wanted)


@pytest.mark.parametrize(
    ("text", "wanted"), [("0-2,8", (0, 1, 2, 8)), ("5", (5,)), ("", ())], ids=["ranges", "one", "none"]
)
def test_lists_of_cores_are_read(text: str, wanted: tuple[int, ...]) -> None:
    assert cpu_list(text) == wanted


def test_the_chosen_of_a_list_is_the_one_in_brackets() -> None:
    assert (chosen("always [madvise] never"), chosen("none")) == ("madvise", "none")


def test_what_lies_in_a_cache_is_counted_and_in_another_folder_is_not(tmp_path: Path) -> None:
    (tmp_path / "shard.bin").write_bytes(b"x" * 100_000)
    assert read_place(Files(), "cache", tmp_path).held_bytes == 0
    (tmp_path / ".stoker").mkdir()
    held = read_place(Files(), "cache", tmp_path).held_bytes
    assert isinstance(held, int)
    assert held >= 100_000
