"""GPU tests are left out where there is no GPU, and fail where one is promised (STOKER_REQUIRE_CUDA=1)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "load"))

PROMISED = os.environ.get("STOKER_REQUIRE_CUDA") == "1"

collect_ignore_glob = [] if PROMISED or Path("/dev/nvidiactl").exists() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def cuda() -> None:
    import torch

    assert torch.cuda.is_available(), "torch sees no CUDA device"
