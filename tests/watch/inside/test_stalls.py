"""Gaps and hangs: what no hook sees is told by the frames the loop is in."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from stoker.watch.inside import stalls
from stoker.watch.inside.collectives import hook_collectives
from stoker.watch.inside.forward import Roots
from stoker.watch.inside.hooks import hook_optimizer
from stoker.watch.inside.probe import Probe
from stoker.watch.runs.columns import read_events
from stoker.watch.runs.files import node_name, process_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from stoker.recording import Event


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Probe]:
    """A probe that calls a hang what lasts 0.3 s."""
    monkeypatch.setattr(stalls, "HANG_S", 0.3)
    probe = Probe(tmp_path)
    probe.begin()
    yield probe
    probe.close()


def step(probe: Probe) -> None:
    for kind in ("data", "optimizer"):
        now = time.monotonic()
        probe.marks.append((kind, now, now, threading.get_ident(), 0, 1))


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
    assert any("test_stalls.py" in line for line in event.facts["frames"])  # it may be reading the events
    assert event.facts["seconds"] >= stalls.GAP_S


def test_every_gap_is_named_also_where_nobody_looked_between_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Probe(tmp_path)
    monkeypatch.setattr(probe, "_open", lambda: None)
    looking = stalls.Stalls(probe, tmp_path / "memory.rows")
    probe.loop.number = 1
    for began in (10.0, 12.5):
        probe.loop.touched = began
        looking._gap(began + 2.0)
    assert len(told(tmp_path, "stack")) == 2


def test_a_hang_of_days_fills_no_disk(tmp_path: Path) -> None:
    probe = Probe(tmp_path)
    looking = stalls.Stalls(probe, tmp_path / "memory.rows")
    probe.loop.touched = 0.0
    for second in range(0, 2 * 86_400, 15):
        looking._hang(float(second))
    assert 20 < len(told(tmp_path, "hang")) < 100


def test_a_hang_is_told_while_it_lasts_and_when_it_is_over(probe: Probe, tmp_path: Path) -> None:
    step(probe)
    module = SimpleNamespace(all_reduce=lambda: until(lambda: told(tmp_path, "hang")))
    hook_collectives(probe, Roots(probe), module)
    module.all_reduce()
    (event,) = told(tmp_path, "hang")
    assert event.facts["inside"] == "collective"
    assert event.facts["in_collective"]
    assert (event.facts["collective_seq"], event.facts["collective_op"]) == (1, "all_reduce")
    assert any("test_stalls.py" in line for line in event.facts["stacks"]["MainThread"])
    assert told(tmp_path, "stack") == [], "inside a span there is no gap"
    until(lambda: told(tmp_path, "hang over"))
    assert told(tmp_path, "hang over")[0].facts["seconds"] >= 0.3


def test_a_hang_in_an_optimizers_step_is_named_although_its_hooks_leave_no_frame(
    probe: Probe, tmp_path: Path
) -> None:
    import torch
    from torch.optim import optimizer as optimizers

    hook_optimizer(
        probe,
        Roots(probe),
        SimpleNamespace(
            Optimizer=optimizers.Optimizer,
            register_optimizer_step_pre_hook=lambda hook: None,
            register_optimizer_step_post_hook=lambda hook: None,
        ),
    )
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    optimizer.step()  # what torch imports for the first one is no part of the hang
    step(probe)
    until(lambda: not probe.marks)
    before = len(told(tmp_path, "hang"))
    optimizer.step(lambda: until(lambda: len(told(tmp_path, "hang")) > before))
    assert told(tmp_path, "hang")[-1].facts["inside"] == "optimizer"


def test_the_top_frame_is_the_users_not_a_librarys() -> None:
    frames = ["/home/me/train.py:3 main", f"{threading.__file__}:10 wait"]
    assert stalls.top_user_frame(frames) == "/home/me/train.py:3 main"
    assert stalls.top_user_frame(frames[1:]) == frames[1]
