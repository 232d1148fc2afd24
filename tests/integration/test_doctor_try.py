"""`stoker doctor --try` on real disks and processes: it writes only where it was told, and leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stoker.doctor.trying.cards import try_cards
from stoker.doctor.trying.folder import BYTES, try_folder
from stoker.doctor.trying.locking import try_locking

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

TRIED = """
import json, sys
from pathlib import Path
from stoker.doctor.trying.folder import try_folder
from stoker.machine.plain import as_plain
print(json.dumps(as_plain(try_folder(sys.argv[1], Path(sys.argv[2])))))
"""


@pytest.fixture
def on_mount(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]], need_root: None
) -> Callable[..., dict[str, object]]:
    """Try a folder after these lines of shell, with mounts of its own."""
    folder = tmp_path / "mounted"
    folder.mkdir()

    def run(lines: str, role: str = "cache") -> dict[str, object]:
        script = f'set -e; mount --make-rprivate /; {lines.format(folder=folder)}; "$@"; ls -A {folder} >&2'
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", script, "sh", sys.executable, "-c", TRIED, role, folder],
            env=stoker_environ(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, object] = json.loads(done.stdout)
        return {**found, "left": done.stderr.split()}

    return run


def test_a_folder_is_written_and_read_and_nothing_stays(tmp_path: Path) -> None:
    trial = try_folder("cache", tmp_path)
    assert trial.error is None
    assert isinstance(trial.direct, bool)
    rates = (trial.write_bytes_s, trial.read_bytes_s, trial.sync_s)
    assert all(isinstance(value, float) and value > 0 for value in rates)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("made", "error"),
    [
        ("mount -t tmpfs -o size=400m tmpfs {folder}", None),
        ("mount -t tmpfs -o size=100m tmpfs {folder}", "too little to try"),
        ("mount -t tmpfs -o ro tmpfs {folder}", "Read-only file system"),
        ("rmdir {folder}; mkdir {folder}.x; ln -s {folder}.x {folder}", None),
    ],
    ids=["room", "full", "read-only", "link"],
)
def test_a_cache_says_why_it_cannot_be_written(
    made: str, error: str | None, on_mount: Callable[..., dict[str, object]]
) -> None:
    found = on_mount(made)
    said = found.get("error")
    assert said is None if error is None else error in str(said)
    assert found["left"] == []


def test_a_disk_that_fills_up_meanwhile_is_told_and_left_empty(
    on_mount: Callable[..., dict[str, object]], tmp_path: Path
) -> None:
    """statvfs promises room that is not there: a quota, another writer, or here blocks of a sparse disk."""
    disk = tmp_path / "disk"
    lines = (
        f"mount -t tmpfs -o size=40m tmpfs {tmp_path}/mounted; truncate -s 2G {tmp_path}/mounted/disk; "
        f"mkfs.ext4 -q -O ^has_journal {tmp_path}/mounted/disk; mkdir {disk}; "
        f"mount -o loop {tmp_path}/mounted/disk {disk}; mount --bind {disk} {tmp_path}/mounted"
    )
    found = on_mount(lines)
    assert found["error"] in (
        "Input/output error",
        "No space left on device",
        "the disk took a part of a write",
    )
    assert found["left"] == ["lost+found"]


def test_data_that_may_not_be_written_is_read_as_it_lies(on_mount: Callable[..., dict[str, object]]) -> None:
    lines = "mount -t tmpfs tmpfs {folder}; head -c 3M /dev/zero > {folder}/shard.bin"
    lines += "; mount -o remount,ro {folder}"
    found = on_mount(lines, role="data")
    assert (found["write_bytes_s"], found["error"], found["left"]) == (None, None, ["shard.bin"])
    assert isinstance(found["read_bytes_s"], float)


def test_a_folder_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    assert try_folder("cache", tmp_path / "nowhere").error == "No such file or directory"
    assert list(tmp_path.iterdir()) == []


def test_memory_is_locked_and_let_go() -> None:
    trial = try_locking()
    assert trial.bytes == BYTES
    assert trial.error is None or "memory" in trial.error.lower()


def test_two_processes_add_up_on_a_machine_without_cards() -> None:
    ranks = try_cards(0)
    assert isinstance(ranks, tuple)
    assert [(rank.rank, rank.device, rank.error, rank.sum_right) for rank in ranks] == [
        (0, "cpu", None, True), (1, "cpu", None, True),
    ]  # fmt: skip


def test_ctrl_c_leaves_neither_files_nor_processes(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    """Sent while the ranks run: their folder is there."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    doctor = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "doctor", "--try", "--cache", cache],
        env=stoker_environ(TMPDIR=str(temporary)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not any(temporary.glob("stoker-try-*")):
        assert doctor.poll() is None
        time.sleep(0.01)
    doctor.send_signal(signal.SIGINT)
    doctor.communicate(timeout=60)
    assert doctor.returncode not in (0, 1)
    assert [*cache.iterdir(), *temporary.iterdir()] == []
    with pytest.raises(ProcessLookupError):
        os.killpg(doctor.pid, 0)
