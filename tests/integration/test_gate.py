"""The gate on machines made in namespaces: two cards that are stood in for, real mounts and limits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration

NEED = {"gpus": 2, "shm_bytes": 1 << 30, "cache_bytes": 64 << 20, "inodes": 100, "open_files": 2000}
MACHINE = (
    "mount --rbind {sys} /sys; mount --bind {proc}/cpuinfo /proc/cpuinfo; nvidia-smi -i 0 -mig 0; "
    "mount -t tmpfs -o size=1g tmpfs {folder}; mount -t tmpfs -o size=2g tmpfs /dev/shm"
)


@pytest.mark.parametrize(
    ("made", "under", "stops"),
    [
        ("true", "", []),
        ("mount -o remount,size=64m /dev/shm", "", ["shared memory"]),
        ("head -c 1100M /dev/zero > /dev/shm/left", "", ["shared memory"]),
        ("mount -o remount,ro {folder}", "", ["writable cache"]),
        ("umount {folder}; rmdir {folder}; ln -s /nowhere {folder}", "", ["writable cache"]),
        ("mount -o remount,size=48m {folder}", "", ["free space"]),
        ("mount -o remount,nr_inodes=50 {folder}", "", ["free inodes"]),
        ("true", "prlimit --nofile=1024:1024", ["open files"]),
        ("true", "prlimit --nofile=1024:4096", []),
        ("nvidia-smi -i 1 -mig 1", "", ["MIG"]),
        ("true", "env CUDA_LAUNCH_BLOCKING=1", ["torch variables"]),
    ],
)
def test_the_gate_stops_what_it_should(
    made: str,
    under: str,
    stops: list[str],
    laid_out: dict[str, Path],
    namespaces: tuple[str, ...],
    stoker_environ: Callable[..., dict[str, str]],
) -> None:
    need = laid_out["real"] / "need.json"
    need.write_text(json.dumps(NEED))
    words = [sys.executable, "-m", "stoker.cli", "doctor", "--json", "--for", need]
    script = f'set -e; mount --make-rprivate /; {MACHINE}; {made}; exec {under} "$@"'.format(**laid_out)
    done = subprocess.run(
        [*namespaces, "sh", "-c", script, "sh", *words, "--cache", laid_out["folder"]],
        env=stoker_environ(PATH=f"{laid_out['bin']}:{os.environ['PATH']}", PYTHONPATH=str(laid_out["bin"])),
        cwd=laid_out["real"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout, done.stderr
    checks = json.loads(done.stdout)["checks"]
    failed = [one["check"] for one in checks if one["level"] == "fail"]
    assert (failed, done.returncode) == (stops, 1 if stops else 0)
