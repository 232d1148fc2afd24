"""Copies behind the loop: the first is taken at once and proves that the others may be taken so."""

from __future__ import annotations

import threading
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounter
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

from stoker.checkpoint.snapshot.copy import Snapshot
from stoker.checkpoint.snapshot.witness import Witness, comb
from stoker.errors import CheckpointError


class Plain:
    """A linear model whose weights are all one number, and its optimizer."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(300, 200, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9)

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def step(self) -> None:
        self.model.weight.grad = torch.full_like(self.model.weight, -1.0)
        self.optimizer.step()


def saved_weight(checkpointer: Any) -> torch.Tensor:
    return checkpointer.load(keys=["model.weight"])["model"]["weight"]


def through_data(model: torch.nn.Module) -> None:
    model.weight.data.add_(1)


def through_numpy(model: torch.nn.Module) -> None:
    model.weight.detach().numpy()[:] += 1


def through_dlpack(model: torch.nn.Module) -> None:
    torch.from_dlpack(model.weight.detach().__dlpack__()).add_(1)


@pytest.mark.parametrize("change", [through_data, through_numpy, through_dlpack])
def test_a_change_that_torch_does_not_count_switches_overlap_off(open_checkpointer, change) -> None:
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    checkpointer.save(1, **job.objects)
    change(job.model)  # before the optimizer's step: nothing waits for the copy
    job.step()
    with pytest.warns(RuntimeWarning, match=r"overlap=True is switched off .* model\.weight was changed"):
        checkpointer.wait()
    assert bool((saved_weight(checkpointer) == 1).all())
    for step in (2, 3):  # and the next are copied at once, in silence
        before = float(job.model.weight[0, 0].detach())
        checkpointer.save(step, **job.objects)
        change(job.model)
        checkpointer.wait()
        assert bool((saved_weight(checkpointer) == before).all())


def test_a_loop_that_keeps_to_the_rule_overlaps_from_the_second_save_on(open_checkpointer) -> None:
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    seen = []
    for step in range(1, 4):
        before = float(job.model.weight[0, 0].detach())
        checkpointer.save(step, **job.objects)
        seen.append(checkpointer.report().check_s)
        job.step()
        checkpointer.wait()
        assert bool((saved_weight(checkpointer) == before).all())
    assert seen[0] > 0
    assert seen[1:] == [seen[0]] * 2  # proven once


def test_a_save_without_a_step_behind_it_proves_nothing(open_checkpointer) -> None:
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    checkpointer.save(1, **job.objects)
    checkpointer.save(2, **job.objects)  # nothing happened in between
    through_data(job.model)
    with pytest.warns(RuntimeWarning, match="overlap=True is switched off"):
        checkpointer.save(3, **job.objects)
    checkpointer.wait()


def test_weights_changed_behind_an_overlapped_copy_fail_the_save(open_checkpointer) -> None:
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    checkpointer.save(1, **job.objects)
    job.step()
    checkpointer.wait()
    checkpointer.save(2, **job.objects)
    with torch.no_grad():
        job.model.weight.add_(1)  # no optimizer's step: nothing could wait
    with pytest.raises(CheckpointError, match=r"changed while being copied, model\.weight first"):
        checkpointer.wait()
    assert checkpointer.latest().step == 1


@pytest.fixture
def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Copies behind the loop wait for this event: whatever the loop does before falls into them."""
    go, copy_rest = threading.Event(), Snapshot._copy_rest

    def when_told(snapshot: Snapshot) -> None:
        go.wait()
        copy_rest(snapshot)

    monkeypatch.setattr(Snapshot, "_copy_rest", when_told)
    return go


@pytest.mark.parametrize("change", [through_data, through_numpy, through_dlpack])
def test_a_later_change_that_torch_does_not_count_fails_its_save_and_ends_overlap(
    open_checkpointer, hold_copies, change
) -> None:
    """The first overlapped save has proved itself; a schedule of the loop may begin to write later."""
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    checkpointer.save(1, **job.objects)
    job.step()
    checkpointer.wait()
    checkpointer.save(2, **job.objects)
    change(job.model)
    hold_copies.set()
    job.step()
    with pytest.raises(CheckpointError, match=r"past what torch counts, .* model\.weight first"):
        checkpointer.wait()
    assert checkpointer.latest().step == 1
    before = float(job.model.weight[0, 0].detach())
    checkpointer.save(3, **job.objects)  # copied at once
    change(job.model)
    job.step()
    checkpointer.wait()
    assert bool((saved_weight(checkpointer) == before).all())


def test_a_writer_that_is_faster_than_the_second_look_waits_for_it(
    open_checkpointer, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, look, finish = threading.Event(), Witness.look, Snapshot.finish

    def finish_first(snapshot: Snapshot) -> None:
        written.set()
        finish(snapshot)

    def look_last(witness: Witness) -> None:
        written.wait()
        look(witness)

    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    checkpointer.save(1, **job.objects)
    job.step()
    checkpointer.wait()
    monkeypatch.setattr(Snapshot, "finish", finish_first)
    monkeypatch.setattr(Witness, "look", look_last)
    before = float(job.model.weight[0, 0].detach())
    checkpointer.save(2, **job.objects)
    job.step()
    checkpointer.wait()
    assert bool((saved_weight(checkpointer) == before).all())


def test_counted_changes_behind_a_copy_end_overlap_too(open_checkpointer) -> None:
    """Or with on_failure="warn" every save from then on would fail."""
    job, checkpointer = Plain(), open_checkpointer(overlap=True, on_failure="warn")
    job.step()
    for step in range(1, 4):
        checkpointer.save(step, **job.objects)
        if step == 2:
            with torch.no_grad():
                job.model.weight.add_(1)
        job.step()
        with pytest.warns(RuntimeWarning, match="while being copied") if step == 2 else nullcontext():
            checkpointer.wait()
    assert checkpointer.latest().step == 3


def test_what_is_no_number_has_not_changed(open_checkpointer) -> None:
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    job.step()
    job.model.weight.data.fill_(float("nan"))
    for step in range(1, 4):
        checkpointer.save(step, **job.objects)
        job.step()
        checkpointer.wait()
    assert checkpointer.latest().step == 3


@given(st.integers(0, 5000), st.integers(0, 10**6))
def test_every_tensor_is_looked_at_again_within_some_saves(count: int, first: int) -> None:
    teeth = [comb(count, first + turn) for turn in range(-(-count // 64))]
    assert sorted({at for some in teeth for at in some}) == list(range(count))
    assert max(map(len, teeth), default=0) <= 64


@given(
    shape=st.lists(st.integers(0, 40), max_size=4),
    axes=st.randoms(use_true_random=False),
    turn=st.integers(0, 99),
)
def test_a_witness_of_any_tensor_sees_a_change_of_all_of_it_and_nothing_else(shape, axes, turn) -> None:
    tensor = torch.randn(shape).permute(axes.sample(range(len(shape)), len(shape)))
    for changes in (False, True):
        witness = Witness([tensor], turn=turn)
        if changes:
            tensor.data.add_(1)
        witness.look()
        assert witness.changed() == (0 if changes and tensor.numel() else None)


class Foreign:
    """An optimizer that is none of torch's: its step calls no hook."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.mean = model, torch.zeros(5)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def step(self) -> None:
        self.model.weight.data.add_(1)
        self.mean.add_(1)


@pytest.mark.long
def test_what_nobody_hooks_is_never_copied_behind(open_checkpointer) -> None:
    model = torch.nn.Linear(3000, 500, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer, checkpointer = Foreign(model), open_checkpointer(overlap=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(4):
            checkpointer.save(step, model=model, optimizer=optimizer)
            optimizer.step()
            checkpointer.wait()
            assert bool((saved_weight(checkpointer) == step).all())


def test_parameters_that_no_saved_optimizer_steps_are_copied_at_once(open_checkpointer) -> None:
    """As an average of the weights is: nobody says when it changes."""
    job, checkpointer = Plain(), open_checkpointer(overlap=True)
    average = torch.nn.Linear(300, 200, bias=False)
    for step in range(1, 4):
        average.weight.data.fill_(step)
        checkpointer.save(step, average=average, **job.objects)
        average.weight.data.fill_(-1)
        job.step()
        checkpointer.wait()
        assert bool((checkpointer.load()["average"]["weight"] == step).all())


def test_two_savers_may_overlap_with_one_optimizer(open_checkpointer, tmp_path) -> None:
    """torch goes through its hooks while they run: none may take itself away."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    with (
        open_checkpointer(tmp_path / "a", overlap=True) as one,
        open_checkpointer(tmp_path / "b", overlap=True) as two,
    ):
        for step in range(1, 5):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            one.save(step, model=model, optimizer=optimizer)
            two.save(step, model=model, optimizer=optimizer)
    for folder in ("a", "b"):
        again = torch.nn.Linear(8, 8)
        with open_checkpointer(tmp_path / folder) as saver:
            assert saver.restore(model=again).step == 4
        assert torch.equal(again.weight, model.weight)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, of what it imports to compile
def test_a_compiled_step_waits_for_the_copy_and_is_not_compiled_again_for_it(open_checkpointer) -> None:
    job, compiled, seen = Plain(), CompileCounter(), []
    checkpointer = open_checkpointer(overlap=True)
    step = torch.compile(lambda: job.optimizer.step(), backend=compiled)
    job.model.weight.grad = torch.full_like(job.model.weight, -1.0)
    for number in range(1, 6):
        step()
        before = float(job.model.weight[0, 0].detach())
        checkpointer.save(number, **job.objects)
        step()
        checkpointer.wait()
        assert bool((saved_weight(checkpointer) == before).all())
        seen.append(compiled.frame_count)
    assert len(set(seen[1:])) == 1  # of the first, with its proof, once more


def test_an_overlapped_save_leaves_no_hook_behind(open_checkpointer) -> None:
    before = len(hooks)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters())
    with open_checkpointer(overlap=True) as saver:
        for step in range(1, 4):
            model(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            saver.save(step, model=model, optimizer=optimizer)
            assert len(hooks) == before + 1
    assert len(hooks) == before
