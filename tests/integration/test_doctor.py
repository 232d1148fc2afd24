"""`stoker doctor` as a user meets it, on this machine and on faults made for it: a small /dev/shm, limits,
cgroups, mounts. All of them live in namespaces and groups of the test's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from groups import cgroup

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

DOCTOR = [sys.executable, "-m", "stoker.cli", "doctor"]
MIB = 1 << 20


class Ended:
    """How a doctor ended, and what its checks saw."""

    def __init__(self, done: subprocess.CompletedProcess[str]) -> None:
        assert done.returncode in (0, 1), done.stderr
        assert done.stdout, done.stderr
        self.rc, self.stderr, self.report = done.returncode, done.stderr, json.loads(done.stdout)

    def seen(self, check: str, role: str = "") -> list[tuple[str, str]]:
        """Level and text of a check; of one place, if a role is given."""
        found = [one for one in self.report["checks"] if one["check"] == check]
        return [(one["level"], one["read"]) for one in found if one["read"].startswith(role)]

    def level(self, check: str, role: str = "") -> str:
        ((level, _),) = self.seen(check, role)
        return level


@pytest.fixture
def doctor(stoker_environ: Callable[..., dict[str, str]], tmp_path: Path) -> Callable[..., Ended]:
    """Run `stoker doctor --json ARGUMENTS`, under another command if one is given."""

    def run(*arguments: object, under: tuple[str, ...] = ()) -> Ended:
        done = subprocess.run(
            [*under, *DOCTOR, "--json", *map(str, arguments)],
            env=stoker_environ(),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return Ended(done)

    return run


@pytest.fixture(scope="session")
def with_mounts(skip_or_fail: Callable[[str], None]) -> Callable[[str], tuple[str, ...]]:
    """What to put before a command so that it runs after these lines of shell, with mounts of its own."""
    namespace = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--map-root-user", "--mount")
    if subprocess.run([*namespace, "true"], capture_output=True).returncode:
        skip_or_fail("no mount namespace can be made here: run as root, or allow user namespaces")

    def before(lines: str) -> tuple[str, ...]:
        script = f'set -e; mount --make-rprivate /; {lines}; exec "$@"'
        command = (*namespace, "sh", "-c", script, "sh")
        if os.geteuid() != 0 and subprocess.run([*command, "true"], capture_output=True).returncode:
            skip_or_fail("the root of a user namespace may not make these mounts: run as root")
        return command

    return before


def test_this_machine_is_examined_without_anything_heavy(
    stoker_environ: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    program = (
        "import sys; from stoker.cli import run; run(['doctor']); "
        "print('HEAVY', *sorted({'numpy', 'torch', 'rich', 'obstore'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=stoker_environ(), cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY"
    assert done.stderr == ""


def test_it_needs_no_privileges(doctor: Callable[..., Ended], require_binary: Callable[[str], str]) -> None:
    drop = (require_binary("setpriv"), "--inh-caps=-all", "--bounding-set=-all")
    ended = doctor(under=drop if os.geteuid() == 0 else ())
    assert ended.stderr == ""
    assert not ended.seen("locked memory")[0][1].endswith("not for one without")


def test_what_was_recorded_is_examined_elsewhere_with_the_same_result(
    doctor: Callable[..., Ended], tmp_path: Path
) -> None:
    here = doctor("--record", tmp_path / "snap.json", "--cache", tmp_path)
    there = doctor(tmp_path / "snap.json")
    assert (there.rc, there.report) == (here.rc, here.report)


def test_a_small_shm_is_a_failure(
    doctor: Callable[..., Ended], with_mounts: Callable[[str], tuple[str, ...]]
) -> None:
    ended = doctor(under=with_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm"))
    assert ended.rc == 1
    ((level, read),) = ended.seen("shared memory")
    assert (level, read) == ("fail", "/dev/shm has 64 MiB, 0 B of it used: the container default")


def test_a_large_shm_that_is_full_fails_a_job_that_needs_it(
    doctor: Callable[..., Ended], with_mounts: Callable[[str], tuple[str, ...]], tmp_path: Path
) -> None:
    (tmp_path / "loader.json").write_text('{"workers": 4, "prefetch": 1, "batch_bytes": 2097152}')
    empty = with_mounts("mount -t tmpfs -o size=20m tmpfs /dev/shm")
    full = with_mounts("mount -t tmpfs -o size=20m tmpfs /dev/shm; head -c 8M /dev/zero > /dev/shm/left")
    levels = [
        doctor("--for", tmp_path / "loader.json", under=under).level("shared memory")
        for under in (empty, full)
    ]
    assert levels == ["ok", "fail"]


def test_small_limits_are_found_and_large_ones_are_not(
    doctor: Callable[..., Ended], require_binary: Callable[[str], str]
) -> None:
    prlimit = require_binary("prlimit")
    small = doctor(under=(prlimit, "--memlock=65536:65536", "--nofile=1024:1024"))
    assert small.seen("locked memory")[0][1].startswith("memlock 64 KiB (hard 64 KiB)")
    assert small.seen("open files") == [("warn", "1,024 open files (hard 1,024); 4,096 are usual")]
    large = doctor(under=(prlimit, "--nofile=8192:8192"))
    assert large.level("open files") == "ok"


def test_limits_of_a_cgroup_are_found(
    doctor: Callable[..., Ended], skip_or_fail: Callable[[str], None], tmp_path: Path
) -> None:
    (tmp_path / "need.json").write_text(json.dumps({"memory_bytes": 2 << 30, "cpu_cores": 1}))
    try:
        with cgroup(memory_bytes=1 << 30, cores=0.5) as under:
            ended = doctor("--for", tmp_path / "need.json", under=under)
    except OSError as error:
        skip_or_fail(f"no cgroup can be made here, run as root: {error}")
    assert ended.seen("memory limit") == [
        ("fail", "1 GiB may be used (cgroup limit 1 GiB); 2 GiB are needed")
    ]
    assert ended.level("cores") == "fail"
    assert ended.seen("CPU quota")[0][1].startswith(f"quota 0.5 cores, {os.cpu_count()} are seen")


@pytest.fixture
def folder(tmp_path: Path, skip_or_fail: Callable[[str], None]) -> Path:
    """A folder on a disk."""
    if os.major(tmp_path.stat().st_dev) == 0:
        skip_or_fail("the temporary folder does not lie on a disk: name one in TMPDIR")
    (tmp_path / "nvme").mkdir()
    return tmp_path / "nvme"


def mounted(folder: Path, options: str) -> str:
    return f"mount --bind {folder} {folder}; mount -o remount,bind,{options} {folder}"


@pytest.mark.parametrize(("options", "level"), [("relatime", "warn"), ("noatime", "ok")])
def test_access_times_are_found_where_they_are_written(
    options: str,
    level: str,
    doctor: Callable[..., Ended],
    with_mounts: Callable[[str], tuple[str, ...]],
    folder: Path,
) -> None:
    ended = doctor("--cache", folder, under=with_mounts(mounted(folder, options)))
    assert ended.level("access times") == level


def test_an_nvme_that_is_not_mounted_is_missed(
    doctor: Callable[..., Ended], with_mounts: Callable[[str], tuple[str, ...]], folder: Path
) -> None:
    """The same folder: as it lies, with a disk's filesystem at it, and with memory at it."""
    lies_on = subprocess.run(
        ["df", "--output=source,target", folder], capture_output=True, text=True, check=True
    )
    source, target = lies_on.stdout.splitlines()[1].split()
    missed = target == "/" and not source.startswith("/dev/nvme")
    assert doctor("--cache", folder).level("cache on NVMe") == ("warn" if missed else "ok")
    there = doctor("--cache", folder / "stoker", under=with_mounts(mounted(folder, "noatime")))
    assert there.level("cache on NVMe") == "ok"
    in_memory = doctor("--cache", folder, under=with_mounts(f"mount -t tmpfs tmpfs {folder}"))
    assert "counts as memory" in in_memory.seen("cache on NVMe")[0][1]


def test_room_that_does_not_do_is_found(
    doctor: Callable[..., Ended], with_mounts: Callable[[str], tuple[str, ...]], folder: Path
) -> None:
    need = folder.parent / "need.json"
    need.write_text(json.dumps({"cache_bytes": 64 * MIB}))
    small = f"mount -t tmpfs -o size=32m,nr_inodes=10 tmpfs {folder}; cd {folder}; touch 1 2 3 4 5 6 7 8 9"
    ended = doctor("--cache", folder, "--for", need, under=with_mounts(small))
    assert (ended.rc, ended.level("free space"), ended.level("free inodes")) == (1, "fail", "fail")
    large = f"mount -t tmpfs -o size=128m tmpfs {folder}"
    ended = doctor("--cache", folder, "--for", need, under=with_mounts(large))
    assert (ended.level("free space"), ended.level("free inodes")) == ("ok", "ok")


def test_data_that_is_not_there_is_a_failure(doctor: Callable[..., Ended], tmp_path: Path) -> None:
    ended = doctor("--data", tmp_path / "nowhere")
    assert (ended.rc, ended.level("filesystem", "data")) == (1, "fail")


def test_changes_are_shown_then_made_and_seen(
    doctor: Callable[..., Ended], with_mounts: Callable[[str], tuple[str, ...]], folder: Path
) -> None:
    under = with_mounts(mounted(folder, "relatime"))
    with_mounts(
        f"{mounted(folder, 'relatime')}; mount -o remount,noatime {folder}"
    )  # what the change will do
    shown = doctor("--cache", folder, "--fix", "--dry-run", under=under)
    assert (
        f"change: mount -o remount,noatime {folder}\n  undo: mount -o remount,relatime {folder}"
        in shown.stderr
    )
    assert shown.level("access times") == "warn"
    made = doctor("--cache", folder, "--fix", "--yes", under=under)
    assert made.level("access times") == "ok"


def test_nothing_is_changed_unasked(
    stoker_environ: Callable[..., dict[str, str]],
    with_mounts: Callable[[str], tuple[str, ...]],
    folder: Path,
) -> None:
    done = subprocess.run(
        [*with_mounts(mounted(folder, "relatime")), *DOCTOR, "--cache", str(folder), "--fix"],
        env=stoker_environ(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: nobody is there to ask" in done.stderr
