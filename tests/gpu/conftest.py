"""GPU tests skip on machines without one, and fail where one is promised (STOKER_REQUIRE_CUDA=1)."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "load"))


@pytest.fixture(scope="session", autouse=True)
def cuda():
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        return
    if os.environ.get("STOKER_REQUIRE_CUDA") == "1":
        pytest.fail("STOKER_REQUIRE_CUDA=1, but torch sees no CUDA device")
    pytest.skip("no CUDA device")
