"""Lets these tests use the runs made for tests/report, and the way other integration tests start servers."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "report"), str(TESTS / "integration")]
