"""Steps and evaluations from the order in which batches, gradients and optimizers come."""

from __future__ import annotations

import itertools
import os
from typing import TYPE_CHECKING

import pytest

from stoker.observe.batches import batch_bytes, tokens_of
from stoker.observe.probe import Probe
from stoker.runs.files import node_name, process_key
from stoker.spans import emit, read_ring

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from stoker.spans import Span


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    probe = Probe(tmp_path)
    yield probe
    probe.close()


def data(probe: Probe, *, evaluating: bool = False, last: bool = False, tokens: int = 10) -> None:
    probe.end_data(probe.begin_data(evaluating=evaluating), tokens=tokens, last=last)


def optimize(probe: Probe, optimizer: int = 1) -> None:
    probe.end_optimizer(optimizer, probe.begin_optimizer(optimizer))


def backward(probe: Probe) -> None:
    probe.end("backward", probe.begin_training("backward"))


def ring(folder: Path, kind: str) -> list[Span]:
    return read_ring(folder / f"{kind}-{process_key(node_name(), os.getpid())}.ring")


def spans(folder: Path, kind: str) -> list[Span]:
    return [span for span in ring(folder, "spans") if span.what == kind]


def test_micro_batches_make_one_step(probe: Probe, tmp_path: Path) -> None:
    for _ in range(3):
        for _ in range(2):
            data(probe)
            backward(probe)
        optimize(probe)
    probe.close()
    assert [step.bytes for step in ring(tmp_path, "steps")] == [20, 20, 20], "tokens of both"


def test_two_optimizers_make_one_step(probe: Probe, tmp_path: Path) -> None:
    for _ in range(3):
        data(probe)
        optimize(probe, 1)
        optimize(probe, 2)
    probe.close()
    assert len(ring(tmp_path, "steps")) == 3


def test_a_loop_whose_loader_is_not_seen_has_steps_too(probe: Probe, tmp_path: Path) -> None:
    for _ in range(3):
        optimize(probe, 1)
        optimize(probe, 2)
    probe.close()
    steps = ring(tmp_path, "steps")
    assert [step.step for step in steps] == [0, 1, 2]
    assert all(a.end == b.start for a, b in itertools.pairwise(steps))


def test_an_evaluation_lasts_from_its_first_batch_to_its_loaders_end(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    optimize(probe)
    data(probe, evaluating=True)
    data(probe, evaluating=True)
    data(probe, evaluating=True, last=True)
    data(probe)
    (found,) = spans(tmp_path, "evaluation")
    fetched = spans(tmp_path, "data")
    assert found.start <= fetched[1].start
    assert fetched[3].end <= found.end <= fetched[4].start
    optimize(probe)
    probe.close()
    assert [step.bytes for step in ring(tmp_path, "steps")] == [10, 10], "evaluated tokens are not trained"


def test_an_optimizer_that_raised_does_not_swallow_what_follows(probe: Probe) -> None:
    data(probe)
    probe.begin_optimizer(1)
    data(probe)
    assert probe.open == []


def test_startup_ends_with_the_first_batch_and_is_said_once(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    data(probe)
    (startup,) = spans(tmp_path, "startup")
    assert startup.start < startup.end <= spans(tmp_path, "data")[0].start


def test_what_stages_emit_lands_in_the_same_ring(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    emit("load.wait", start=1.0, end=2.0)
    assert len(spans(tmp_path, "load.wait")) == 1


def test_a_forked_child_writes_nothing_into_its_parents_ring(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    child = os.fork()
    if not child:
        emit("load.wait", start=1.0, end=2.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert spans(tmp_path, "load.wait") == []


def test_tokens_are_seen_in_what_looks_like_text() -> None:
    import torch

    assert tokens_of({"input_ids": torch.zeros(2, 8, dtype=torch.long)}) == 16
    assert tokens_of([torch.zeros(2, 8, dtype=torch.int32), None]) == 16
    assert tokens_of((torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long))) == -1
    assert tokens_of("text") == -1
    assert batch_bytes({"a": torch.zeros(4), "b": [torch.zeros(2), ("x", torch.zeros(1))]}) == 28
