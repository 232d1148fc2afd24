"""Benchmarks of the tests are no history."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_history(monkeypatch):
    monkeypatch.setenv("STOKER_HISTORY", "off")
