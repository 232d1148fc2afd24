"""The simulation of `stoker plan` against real processes before a real, throttled store."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from throttled_store import Store, play, throttled_store

from plan_model import FILE_BYTES, FILES, RATE, SCENES, SLOW_RATE, predict

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def store(require_binary: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    folder = tmp_path_factory.mktemp("store")
    rclone, nginx = require_binary("rclone"), require_binary("nginx")
    with throttled_store(
        folder, rate=RATE, slow_rate=SLOW_RATE, files=FILES, file_bytes=FILE_BYTES, rclone=rclone, nginx=nginx
    ) as store:
        yield store


# The store's own limit is what takes the time: a busy machine adds little to it.
@pytest.mark.parametrize("name", ["store, 4 nodes", "shares, 4 nodes"])
def test_the_simulation_says_within_15_percent_how_long_a_job_takes(
    store: Store, name: str, tmp_path: Path
) -> None:
    scene = replace(SCENES[name], files=8)  # half of the dataset is half of the time
    course, seen = predict(scene), play(store, scene, tmp_path / "nodes")
    assert course.seconds == pytest.approx(seen.seconds, rel=0.15)
    assert course.idle_share == pytest.approx(seen.idle_share, rel=0.15)
