"""Runs to show, summarised once."""

from __future__ import annotations

import pytest
from made_runs import STARVED, STRAGGLER, job

from stoker.recording import Recording
from stoker.report.summary import Summary, summarise


@pytest.fixture(scope="session")
def recording() -> Recording:
    """A job of four ranks of which the last is late."""
    return job()


@pytest.fixture(scope="session")
def summary(recording: Recording) -> Summary:
    return summarise(recording, [STARVED, STRAGGLER], price=2.5)
