"""Gaps and hangs: what no hook sees is told by the frames the loop is in."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from stoker.inside import stalls
from stoker.inside.probe import Probe
from stoker.runs.columns import read_events
from stoker.runs.files import node_name, process_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stoker.recording import Event


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """A probe that calls a hang what lasts 0.3 s."""
    monkeypatch.setattr(stalls, "HANG_S", 0.3)
    probe = Probe(tmp_path)
    yield probe
    probe.close()


def step(probe: Probe) -> None:
    start = put(probe, probe.loop.begin_data, False)
    put(probe, probe.loop.end_data, start, 4)
    put(probe, probe.loop.begin_optimizer, 1)
    put(probe, probe.loop.end_optimizer, 1)


def put(probe: Probe, read: Callable[..., None], *told: object) -> float:
    """A mark of this moment and thread, as hooks put it."""
    now = time.monotonic()
    probe.put((read, now, threading.get_ident(), *told))
    return now


def told(folder: Path, what: str) -> list[Event]:
    import os

    path = folder / f"events-{process_key(node_name(), os.getpid())}.jsonl"
    return [event for event in read_events(path, shift_s=0.0) if event.what == what]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_gap_between_spans_is_named_by_its_frame(probe: Probe, tmp_path: Path) -> None:
    step(probe)
    step(probe)
    until(lambda: told(tmp_path, "stack"))
    event = told(tmp_path, "stack")[0]
    assert "test_stalls.py" in event.text
    assert event.facts["seconds"] >= stalls.GAP_S


def test_a_hang_is_told_while_it_lasts_and_when_it_is_over(probe: Probe, tmp_path: Path) -> None:
    step(probe)
    start = put(probe, probe.loop.begin, "collective", "all_reduce")
    until(lambda: told(tmp_path, "hang"))
    (event,) = told(tmp_path, "hang")
    assert event.facts["inside"] == "collective"
    assert event.facts["in_collective"]
    assert (event.facts["collective_seq"], event.facts["collective_op"]) == (1, "all_reduce")
    assert any("test_stalls.py" in line for line in event.facts["stacks"]["MainThread"])
    assert told(tmp_path, "stack") == [], "inside a span there is no gap"
    put(probe, probe.loop.end, "collective", start)
    until(lambda: told(tmp_path, "hang over"))
    assert told(tmp_path, "hang over")[0].facts["seconds"] >= 0.3


def test_the_top_frame_is_the_users_not_a_librarys() -> None:
    frames = ["/home/me/train.py:3 main", f"{threading.__file__}:10 wait"]
    assert stalls.top_user_frame(frames) == "/home/me/train.py:3 main"
    assert stalls.top_user_frame(frames[1:]) == frames[1]
