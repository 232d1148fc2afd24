"""`make demo` shows the point: a run that starves, the cure, a run that does not, and the gain."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parent.parent.parent


def test_the_demo_starves_is_cured_and_gains(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    command = [sys.executable, ROOT / "examples" / "demo.py", "--megabytes", "4", "--seconds", "6"]
    ran = subprocess.run(
        [*map(str, command), "--folder", "demo-out"],
        cwd=tmp_path,
        env=stoker_environ(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    out = tmp_path / "demo-out"
    assert verdict(out / "run-tutorial", stoker_environ()) == "data_starvation"
    assert verdict(out / "run-stoker", stoker_environ()) == "healthy"
    assert float(ran.stdout.partition("gain: ")[2].split()[0]) > 0  # how much depends on who else is here
    reports = ran.stdout.partition("reports, ")[2].split("\n")[1:3]
    assert [Path(line.strip()).parent.name for line in reports] == ["run-tutorial", "run-stoker"]
    assert all(Path(line.strip()).is_file() for line in reports)


def verdict(run: Path, environ: dict[str, str]) -> str:
    """What `stoker diagnose` says of a run that the demo left."""
    command = [sys.executable, "-m", "stoker.cli", "diagnose", "--json", str(run)]
    said = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60).stdout
    return str(json.loads(said)["findings"][0]["kind"])
