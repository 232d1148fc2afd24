"""What doctor reads of this machine is what other programs say of it."""

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

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "doctor_second_source.py"


def test_no_value_differs_from_that_of_a_second_source(stoker_environ: Callable[..., dict[str, str]]) -> None:
    asked = [sys.executable, str(SCRIPT), "--json"]
    done = subprocess.run(asked, env=stoker_environ(), capture_output=True, text=True, timeout=120)
    rows = json.loads(done.stdout)
    assert [row for row in rows if row["verdict"] == "DIFFERS"] == []
    assert done.returncode == 0, done.stderr
    assert sum(row["verdict"] == "same" for row in rows) > 15
