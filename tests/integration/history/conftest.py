"""Lets these tests use the browser of the report's tests, and histories made for tests/history."""

from __future__ import annotations

import sys
from pathlib import Path

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS / "integration" / "report"), str(TESTS / "history")]
