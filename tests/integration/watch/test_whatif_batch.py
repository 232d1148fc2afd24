"""`stoker watch --what-if batch`: one command at several batch sizes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.report.whatif import whatif_lines, whatif_page
from stoker.watch import runs
from stoker.watch.command import Options
from stoker.watch.sizes import find_flag
from stoker.watch.whatif import WhatIf, watch_sizes

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

PROGRAM = Path(__file__).parent / "programs" / "sizes.py"


def test_fixed_and_proportional_time_of_a_job_under_a_shell(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    # The shell starts the program as a child: told to end, it leaves that one behind for us.
    shell = ("sh", "-c", '"$0" "$@"; exit $?', sys.executable, PROGRAM, "--batch-size", 8)
    options = ("--out", "run", "--gpu", "none", "--what-if", "batch", "--window", 0.4)
    done = run_stoker("watch", *options, "--", *shell, env={"OMP_NUM_THREADS": "1"})
    assert done.rc == 0, done.stderr
    folder = tmp_path / "run"
    found = json.loads((folder / "whatif.json").read_text())
    assert [one["batch"] for one in found["visits"]] == [4, 16, 8, 16, 4]
    for size in found["split"]["sizes"]:
        assert size["step_s"] >= 0.020 + 0.002 * size["batch"], "a sleep is never shorter than asked for"
    assert found["split"]["per_sample_s"] > 0
    assert "is fixed (communication, launches, optimizer)" in done.stderr
    assert runs.read_recording(folder / "3-batch-8").ended == "ended when its window was over"
    assert [pid for pid in map(_trainer, folder.glob("*/proc-*.json")) if _runs(pid)] == []
    page = (folder / "whatif.html").read_text("utf-8")
    assert page.count("<circle") == 3
    assert not re.search(r"(src|href)=\"(?!data:)", page), "nothing is fetched from elsewhere"


def test_a_size_that_fails_is_not_tried_again_and_the_code_is_that_of_the_size_given(tmp_path: Path) -> None:
    found = _watch_sizes("case $1 in --bs=16) exit 9;; --bs=8) exit 3;; esac", tmp_path)
    assert [one.visit.batch for one in found.visited] == [4, 16, 8, 4]
    assert (found.code, found.failed, found.split) == (3, {8: 3, 16: 9}, None)
    assert "  batch 16 failed with exit code 9" in whatif_lines(found)
    assert "<svg" not in whatif_page(found)


def test_an_interrupt_ends_the_series(tmp_path: Path) -> None:
    found = _watch_sizes(f"kill -TERM {os.getpid()}; exec sleep 60", tmp_path)
    assert [one.visit.batch for one in found.visited] == [4]
    assert found.code == 128 + signal.SIGTERM
    assert "interrupted" in whatif_lines(found)[0]


def test_a_command_without_a_batch_size_is_refused_and_leaves_no_folder(
    run_stoker: Callable[..., Any], tmp_path: Path
) -> None:
    done = run_stoker("watch", "--what-if", "batch", "--", "python", "train.py")
    assert done.rc == 2
    assert "--batch-flag" in done.stderr
    assert list(tmp_path.iterdir()) == []


def _watch_sizes(script: str, folder: Path) -> WhatIf:
    flag = find_flag(("sh", "-c", script, "sh", "--bs=8"))
    return watch_sizes(flag, Options(folder=folder, gpu="none"), window_s=1.0, shown=lambda _: nullcontext())


def _trainer(meta: Path) -> int:
    return int(json.loads(meta.read_text())["pid"])


def _runs(pid: int) -> bool:
    try:
        return PROGRAM.name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
