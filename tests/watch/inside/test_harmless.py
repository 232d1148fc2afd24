"""What hooks must not do to the program they are in."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from stoker.recording import KINDS
from stoker.watch import runs
from stoker.watch.inside.collectives import hook_collectives
from stoker.watch.inside.device import Copies, hook_syncs
from stoker.watch.inside.forward import Roots, _instances
from stoker.watch.inside.hooks import _say_error_of_loader
from stoker.watch.inside.probe import Probe
from stoker.watch.inside.stalls import Stalls
from stoker.watch.inside.switch import Switch, timed
from stoker.watch.runs.columns import read_rows

if TYPE_CHECKING:
    from pathlib import Path


class Event:
    """A card's event that counts how often it is asked."""

    asked = 0

    def __init__(self, **_: object) -> None: ...
    def record(self) -> None: ...
    def elapsed_time(self, _: object) -> float:
        return 1.0

    def query(self) -> bool:
        Event.asked += 1
        return True


class Graph:
    def capture_begin(self) -> None: ...
    def capture_end(self) -> None: ...


def test_no_event_is_asked_while_a_graph_is_captured(probe: Probe) -> None:
    """That would break the capture, and the program with it."""
    cuda = SimpleNamespace(
        CUDAGraph=Graph, Event=Event, is_initialized=lambda: True, is_current_stream_capturing=lambda: False,
        current_stream=lambda: 0, default_stream=lambda: 0,
    )  # fmt: skip
    on_card = SimpleNamespace(is_cuda=True, nbytes=1 << 22)
    copies = Copies(probe, SimpleNamespace(cuda=cuda))
    copy = copies.watched(lambda tensor, *_, **__: on_card, Switch(probe, "Tensor.to"))
    on_host, graph = SimpleNamespace(is_cuda=False, nbytes=1 << 22), Graph()
    graph.capture_begin()
    copy(on_host, "cuda", non_blocking=True)
    assert Event.asked == 0
    graph.capture_end()
    copy(on_host, "cuda", non_blocking=True)
    assert Event.asked == 1


def test_a_copy_that_first_waits_for_what_the_card_computes_is_a_wait_and_then_a_copy(probe: Probe) -> None:
    """Out of plain memory, in the stream that computes: the event before it comes after the kernels."""
    cuda = SimpleNamespace(
        CUDAGraph=Graph, Event=Event, is_initialized=lambda: True, is_current_stream_capturing=lambda: False,
        current_stream=lambda: 0, default_stream=lambda: 0,
    )  # fmt: skip
    on_card, on_host = (SimpleNamespace(is_cuda=where, nbytes=1 << 22) for where in (True, False))

    def to(tensor: Any, *_: Any, **__: Any) -> Any:
        time.sleep(0.02)  # of which the events say that the card copied for one millisecond
        return on_card

    copies = Copies(probe, SimpleNamespace(cuda=cuda))
    copies.watched(to, Switch(probe, "Tensor.to"))(on_host, "cuda")
    (waited, copied) = probe.marks
    assert [(mark[0], mark[4]) for mark in (waited, copied)] == [("sync", 0), ("h2d", 1 << 22)]
    assert waited[2] == copied[1]
    assert copied[2] - copied[1] == pytest.approx(0.001)
    assert waited[2] - waited[1] >= 0.015


def test_a_number_read_off_the_card_in_any_way_is_a_wait(probe: Probe) -> None:
    class Tensor:
        is_cuda = True

        def item(self) -> float:
            return 1.0

        tolist = item

        def __float__(self) -> float:
            return 2.5

        def __int__(self) -> int:
            return 2

        def __bool__(self) -> bool:
            return False

    cuda = SimpleNamespace(synchronize=lambda: None, Event=SimpleNamespace(synchronize=lambda: None))
    cuda.Stream = SimpleNamespace(synchronize=lambda: None)
    backends = SimpleNamespace(cuda=SimpleNamespace(is_built=lambda: True))
    hook_syncs(probe, None, SimpleNamespace(Tensor=Tensor, cuda=cuda, backends=backends))
    loss = Tensor()
    assert (float(loss), int(loss), bool(loss), loss.item()) == (2.5, 2, False, 1.0)
    assert [mark[0] for mark in probe.marks] == ["sync"] * 4
    loss.is_cuda = False
    assert not loss
    assert len(probe.marks) == 4


def test_a_compiled_program_with_a_condition_on_the_card_runs_as_it_would() -> None:
    """The hook of a condition must be nothing that a compiler looks into."""
    program = """
import torch
from types import SimpleNamespace
from stoker.watch.inside import device
device.has_card = lambda torch: True
probe = SimpleNamespace(begun=True, marks=[], begin=lambda: None)
device.hook_syncs(probe, None, torch)

@torch.compile(backend="eager")
def step(x):
    if x.sum() > 0:
        return x * float(x.max())
    return x - int(x.min())

print(step(torch.ones(3)).tolist(), step(-torch.ones(3)).tolist(), bool(torch.zeros(1)), len(probe.marks))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[1.0, 1.0, 1.0] [0.0, 0.0, 0.0] False 0\n", done.stderr


def test_the_allocator_is_that_of_the_card_the_loop_uses(
    probe: Probe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's current card is the first one."""
    allocated = [0, 0, 0, 7 << 30]
    cuda = SimpleNamespace(
        is_initialized=lambda: True, device_count=lambda: 4, memory_allocated=lambda card: allocated[card],
        memory_stats=lambda card=0: {"allocated_bytes.all.current": allocated[card]},
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    stalls = Stalls(probe, tmp_path / "memory-x.rows")
    stalls._allocator(1.0)
    probe.card = 2
    stalls._allocator(10.0)
    assert read_rows(tmp_path / "memory-x.rows", shift_s=0.0).columns["allocated"].tolist() == [7 << 30, 0]
    stalls._memory.close()


def test_the_objects_of_a_heap_are_told_by_their_type_alone() -> None:
    """There may be eight million. Some answer questions for their class by importing things."""

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("asked")

    class Sought: ...

    class Kind(Sought): ...

    kept = [Proxy(), Kind(), Sought()]
    assert {id(one) for one in kept[1:]} == {id(one) for one in _instances(Sought)}


def test_an_error_without_a_text_goes_on_as_it_is(probe: Probe) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise TypeError("no text")

    _say_error_of_loader(probe, Odd(), None)


def test_ranks_that_a_program_starts_itself_are_those_of_its_group(probe: Probe, tmp_path: Path) -> None:
    """torch.multiprocessing.spawn: nothing in the environment tells them apart."""
    group: Any = SimpleNamespace(
        init_process_group=lambda: None,
        is_initialized=lambda: True,
        get_rank=lambda: 3,
        get_world_size=lambda: 4,
    )
    roots = Roots(probe)
    hook_collectives(probe, roots, group)
    group.init_process_group()
    run = runs.read_recording(tmp_path)
    assert ([rank.rank for rank in run.ranks], run.facts["world"], roots.ranks) == ([3], 4, 4)
    assert np.isfinite(run.wall_s)


def test_a_process_that_only_saves_leaves_no_files_and_its_save_is_told_when_it_trains(
    tmp_path: Path,
) -> None:
    probe, saved = Probe(tmp_path), []
    save = timed(probe, "checkpoint", saved.append, begins=False)
    save(1)
    assert (saved, list(tmp_path.iterdir())) == ([1], [])
    probe.begin()
    probe.close()
    (rank,) = runs.read_recording(tmp_path).ranks
    assert KINDS.index("checkpoint") in rank.spans.kind
