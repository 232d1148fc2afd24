"""The doctor through the real nvidia-ml-py, on a driver's library that stands in for one with two cards."""

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

SOURCE = Path(__file__).with_name("nvml_stand_in.c")


@pytest.fixture(scope="module")
def library(require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nvml") / "libnvidia-ml.so.1"
    subprocess.run([require_binary("cc"), "-shared", "-fPIC", "-o", path, SOURCE], check=True, timeout=60)
    return path


def test_cards_are_told_as_nvml_tells_them(
    library: Path, stoker_environ: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stoker.cli", "doctor", "--json", "--record", "snap.json"],
        env=stoker_environ(LD_LIBRARY_PATH=str(library.parent)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    checks = [one for one in json.loads(done.stdout)["checks"] if one["subject"] == "GPU"]
    assert {(one["check"], one["level"], one["read"]) for one in checks} >= {
        ("GPUs", "ok", "2 × NVIDIA H200"),
        ("GPU driver", "ok", "driver 580.159.03"),
        ("persistence mode", "ok", "GPU 0, 1: persistence mode on"),
        ("ECC", "ok", "GPU 0, 1: ECC on, no uncorrected error"),
        ("power limit", "ok", "GPU 0, 1: power limit 700 W"),
        ("GPU clocks", "ok", "GPU 0: no slowdown, default clocks"),
        ("GPU clocks", "warn", "GPU 1: hardware thermal slowdown"),
        ("PCIe link", "ok", "GPU 0: PCIe gen 5 × 16 of gen 5 × 16"),
        ("PCIe link", "warn", "GPU 1: PCIe gen 5 × 8 of gen 5 × 16"),
        ("peer access", "ok", "all 2 cards reach each other"),
        ("NVLink", "ok", "GPU 0: 4 NVLinks up"),
        ("NVLink", "fail", "GPU 1: NVLink 3 of 4 down"),
    }
    recorded = json.loads((tmp_path / "snap.json").read_text())["gpus"]
    assert [card["bus"] for card in recorded] == ["0000:1a:00.0", "0000:1b:00.0"]
    assert "unknown" in recorded[0]["clock_set_mhz"]
