"""A small corpus, and a check that nothing is left behind."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from small_datasets import make_tokens


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Uneven shards: 41,000 tokens in documents of many lengths."""
    rng = np.random.default_rng(7)
    lengths = [rng.integers(1, 200, n).tolist() for n in (100, 37, 1, 160, 80)]
    return make_tokens(tmp_path / "corpus", lengths)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No test may leave a thread, a file descriptor or a shared-memory segment."""
    threads, files, segments = set(threading.enumerate()), _open_files(), _segments()
    yield
    deadline = time.monotonic() + 5  # a thread that was told to end may need a moment
    while (left := _ours(threads)) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert not left, f"threads left behind: {left}"
    assert _segments() <= segments
    assert len(_open_files()) <= len(files) + 1, "open files left behind"


def _ours(before):
    return {
        thread.name for thread in threading.enumerate() if thread not in before and "stoker" in thread.name
    }


def _open_files():
    return set(os.listdir("/proc/self/fd"))


def _segments():
    return {name for name in os.listdir("/dev/shm") if "stoker" in name and "bench" not in name}
