"""Steps and evaluations from the order in which batches, gradients and optimizers come."""

from __future__ import annotations

import itertools
import os
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest

from recorded_spans import spans_of
from stoker.recording import KINDS
from stoker.spans import emit
from stoker.watch import runs
from stoker.watch.inside.batches import batch_bytes, text_part, tokens_of
from stoker.watch.inside.forward import Roots
from stoker.watch.inside.hooks import hook_gradient
from stoker.watch.inside.loop import EVALUATED, EXHAUSTED, NO_TOKENS
from stoker.watch.inside.probe import Probe
from stoker.watch.runs.columns import read_events
from stoker.watch.runs.files import node_name, process_key, read_meta
from stoker.watch.sampler import trainers

if TYPE_CHECKING:
    from pathlib import Path

    from recorded_spans import Span


def put(probe: Probe, kind: str, note: object = "", *, start: float | None = None) -> float:
    """A mark of this moment and thread, as hooks put it."""
    now = time.monotonic()
    probe.marks.append((kind, start or now, now, threading.get_ident(), 0, note))
    return now


def data(probe: Probe, note: int = 10) -> None:
    put(probe, "data", note)


def optimize(probe: Probe, optimizer: int = 1) -> None:
    put(probe, "optimizer", optimizer)


def backward(probe: Probe) -> None:
    put(probe, "backward")


def ring(folder: Path, kind: str) -> list[Span]:
    return spans_of(folder / f"{kind}-{process_key(node_name(), os.getpid())}.ring")


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
    data(probe, EVALUATED)
    data(probe, EVALUATED)
    data(probe, EXHAUSTED)
    data(probe)
    probe.read_marks()
    (found,) = spans(tmp_path, "evaluation")
    fetched = spans(tmp_path, "data")
    assert found.start <= fetched[1].start
    assert fetched[3].end <= found.end <= fetched[4].start
    optimize(probe)
    probe.close()
    assert [step.bytes for step in ring(tmp_path, "steps")] == [10, 10], "evaluated tokens are not trained"


@pytest.mark.long
def test_an_evaluation_that_the_program_ends_with_ends_where_it_was_last_seen(
    probe: Probe, tmp_path: Path
) -> None:
    data(probe)
    optimize(probe)
    data(probe, EVALUATED)
    probe.read_marks()
    time.sleep(0.05)  # what the program does before it is over: its clean-up is no evaluation
    probe.close()
    (found,) = spans(tmp_path, "evaluation")
    assert found.end == spans(tmp_path, "data")[1].end


def test_a_gradient_says_that_the_batch_before_it_was_no_evaluation(probe: Probe, tmp_path: Path) -> None:
    for _ in range(2):
        data(probe, EVALUATED)
        backward(probe)
        optimize(probe)
    probe.close()
    assert spans(tmp_path, "evaluation") == []
    assert len(ring(tmp_path, "steps")) == 2


def test_nested_spans_of_one_kind_are_one(probe: Probe, tmp_path: Path) -> None:
    outer = put(probe, "data", NO_TOKENS)
    inner = put(probe, "collective", "all_gather")
    put(probe, "collective", "all_gather_object", start=outer)
    put(probe, "collective", "barrier")
    optimize(probe)
    probe.close()
    (rank,) = runs.read_recording(tmp_path).ranks
    (first, _) = rank.spans.start[rank.spans.kind == KINDS.index("collective")]
    assert rank.spans.start[rank.spans.kind == KINDS.index("data")] == first < first + (inner - outer)


def test_the_tokens_of_a_loader_around_another_count_once(probe: Probe, tmp_path: Path) -> None:
    for _ in range(2):
        start = time.monotonic()
        data(probe, 10)
        put(probe, "data", 10, start=start)
        optimize(probe)
    probe.close()
    assert [step.bytes for step in ring(tmp_path, "steps")] == [10, 10]


def test_what_other_threads_do_is_no_part_of_the_step(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    optimize(probe)
    other = threading.Thread(target=data, args=(probe, 1000))
    other.start()
    other.join()
    probe.close()
    assert [step.bytes for step in ring(tmp_path, "steps")] == [10]
    assert {span.thread for span in spans(tmp_path, "data")} == {0, 1}


def test_marks_are_read_by_themselves(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    deadline = time.monotonic() + 10
    while not spans(tmp_path, "data"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_process_whose_files_cannot_be_made_goes_on_and_says_so_once(tmp_path: Path) -> None:
    (tmp_path / f"steps-{process_key(node_name(), os.getpid())}.ring").touch()  # somebody else's
    probe = Probe(tmp_path)
    probe.begin()
    data(probe)
    probe.begin()
    data(probe)
    probe.close()
    (said,) = read_events(tmp_path / f"events-{process_key(node_name(), os.getpid())}.jsonl", shift_s=0.0)
    assert (said.what, said.facts["hook"]) == ("hook off", "recording")


def test_a_process_that_was_replaced_is_recorded_beside_what_it_was(tmp_path: Path) -> None:
    """By exec, or in a container that was started again: the number is that of one before."""
    for _ in range(2):
        probe = Probe(tmp_path)
        probe.begin()
        for _ in range(3):
            data(probe)
            optimize(probe)
        probe.close()
    run = runs.read_recording(tmp_path)
    (rank,) = run.ranks
    assert len(rank.steps.end) == 6
    assert (rank.steps.start[1:] >= rank.steps.end[:-1] - 1e-9).all()
    assert (np.diff(rank.spans.end) >= 0).all()
    assert (run.facts["missing"], trainers(tmp_path, node_name())) == ([], [os.getpid()])


def test_facts_that_json_has_no_word_for_switch_nothing_off(probe: Probe, tmp_path: Path) -> None:
    probe.tell(loader={"num_workers": np.int64(2), "batch_size": np.float32(0.5), "kind": object})
    (path,) = tmp_path.glob("proc-*.json")
    told = read_meta(path)["loader"]
    assert (told["num_workers"], told["batch_size"], told["kind"]) == (2, 0.5, "<class 'object'>")


def test_words_are_no_tokens() -> None:
    assert text_part({"tokens": ["a", "b"]}) is None
    assert text_part({"input_ids": np.zeros((2, 2), int)}) is None


def test_startup_ends_with_the_first_batch_and_is_said_once(probe: Probe, tmp_path: Path) -> None:
    data(probe)
    data(probe)
    probe.read_marks()
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


def test_cycles_of_batch_and_backward_are_steps_where_no_optimizer_of_torchs_steps(
    probe: Probe, tmp_path: Path
) -> None:
    for _ in range(5):
        data(probe)
        backward(probe)
    probe.close()
    assert len(ring(tmp_path, "steps")) == 5


def test_gradients_taken_by_hand_are_steps_and_one_that_keeps_its_graph_is_a_part_of_the_loss(
    probe: Probe, tmp_path: Path
) -> None:
    autograd = SimpleNamespace(grad=lambda loss, inputs, create_graph=False: ())
    hook_gradient(probe, Roots(probe), autograd)
    for _ in range(5):
        data(probe)
        autograd.grad(1.0, [], create_graph=True)
        autograd.grad(1.0, [])
    probe.close()
    assert len(ring(tmp_path, "steps")) == 5


def test_an_optimizer_that_calls_its_parents_step_steps_once(probe: Probe, tmp_path: Path) -> None:
    for _ in range(3):
        backward(probe)
        now = time.monotonic()
        probe.marks.append(("optimizer", now, now + 0.001, None, 0, 7))
        probe.marks.append(("optimizer", now, now + 0.002, None, 0, 7))  # around the one before
        time.sleep(0.003)
    probe.close()
    assert len(ring(tmp_path, "steps")) == 3
