"""A small corpus, and a check that nothing is left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from small_datasets import make_tokens


@pytest.fixture
def corpus(tmp_path) -> Path:
    """Uneven shards: 41,000 tokens in documents of many lengths."""
    return uneven_shards(tmp_path / "corpus", (100, 37, 1, 160, 80))


@pytest.fixture
def small_corpus(tmp_path) -> Path:
    """The same, of 12,000 tokens."""
    return uneven_shards(tmp_path / "small", (30, 11, 1, 48, 24))


def uneven_shards(folder: Path, documents: Sequence[int]) -> Path:
    rng = np.random.default_rng(7)
    return make_tokens(folder, [rng.integers(1, 200, count).tolist() for count in documents])


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """No test may leave a thread, a file descriptor or a shared-memory segment."""
    threads, files, segments = set(threading.enumerate()), _open_files(), _segments()
    yield
    deadline = time.monotonic() + 5  # a thread that was told to end may need a moment, and what torch's holds
    while (_ours(threads) or len(_open_files()) > len(files) + 1) and time.monotonic() < deadline:
        time.sleep(0.005)
    left = _ours(threads)
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
