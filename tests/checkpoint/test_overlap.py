"""Copies behind the loop: the first is taken at once and proves that the others may be taken so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks as hooks

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


class Foreign:
    """An optimizer that is none of torch's: its step calls no hook."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.mean = model, torch.zeros(5)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def step(self) -> None:
        self.model.weight.data.add_(1)
        self.mean.add_(1)


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
