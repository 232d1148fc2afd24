"""`stoker watch`: its exit code is the program's, whatever becomes of what it has to say."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FULL, BROKEN, CLOSED = "2>/dev/full", "2>&1 >&3 | true", "2>&-"


@pytest.mark.parametrize("stderr", [FULL, BROKEN, CLOSED])
def test_a_log_that_cannot_be_written_changes_no_exit_code(
    tmp_path: Path, stderr: str, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    watched = f"{sys.executable} -m stoker.cli watch --out run --gpu none -- sh -c 'echo out; exit 4'"
    script = f"exec 3>&1; ({watched}; echo $? > rc) {stderr}"
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, capture_output=True, text=True, env=stoker_environ()
    )
    assert (tmp_path / "rc").read_text() == "4\n"
    assert done.stdout == "out\n"


def test_where_there_is_no_verdict_it_says_why(run_stoker: Callable[..., Any]) -> None:
    done = run_stoker("watch", "--out", "run", "--gpu", "none", "--", "true")
    assert "why not\n  - healthy: no step was seen, and the GPU was not read" in done.stderr
