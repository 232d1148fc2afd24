"""The flattened state is kept while the objects hold the same tensors; whatever changes is noticed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.saved.layout import path_name
from stoker.checkpoint.snapshot.kept import Kept
from stoker.checkpoint.snapshot.state import flatten


class Loop:
    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Sequential(torch.nn.Linear(3, 3))
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.other: dict[str, Any] = {"n": 0, "t": torch.zeros(2)}

    @property
    def objects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "other": self.other}


def step(loop: Loop) -> None:
    loop.model(torch.randn(4, 3)).sum().backward()
    loop.optimizer.step()


def replace_a_parameter(loop: Loop) -> None:
    loop.model[0].weight = torch.nn.Parameter(torch.randn(3, 3))


def replace_one_that_is_equal(loop: Loop) -> None:
    loop.model[0].bias = torch.nn.Parameter(loop.model[0].bias.detach().clone())


def replace_a_buffer(loop: Loop) -> None:
    loop.model[1].num_batches_tracked = torch.tensor(7)


def replace_a_layer(loop: Loop) -> None:
    loop.model[2] = torch.nn.Sequential(torch.nn.Linear(3, 3))


def replace_an_inner_layer(loop: Loop) -> None:
    loop.model[2][0] = torch.nn.Linear(3, 3)


def add_a_layer(loop: Loop) -> None:
    loop.model.append(torch.nn.Linear(3, 3))


def remove_a_bias(loop: Loop) -> None:
    loop.model[2][0].bias = None


def tie(loop: Loop) -> None:
    loop.model[2][0].weight = loop.model[0].weight


def put_other_data_in(loop: Loop) -> None:
    loop.model[0].weight.data = torch.randn(3, 3)


def turn_the_data(loop: Loop) -> None:
    loop.model[0].weight.data = loop.model[0].weight.data.t()


def make_it_double(loop: Loop) -> None:
    loop.model.double() if loop.model[0].weight.dtype == torch.float32 else loop.model.float()


def hide_a_buffer(loop: Loop) -> None:
    loop.model[1].register_buffer("running_mean", torch.ones(3), persistent=False)


def hook_the_state(loop: Loop) -> None:
    def leave_out(_: Any, state: dict[str, Any], prefix: str, __: Any) -> None:
        state.pop(f"{prefix}bias", None)

    loop.model[0]._register_state_dict_hook(leave_out)


def add_a_group(loop: Loop) -> None:
    loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], "lr": 3.0})


def change_the_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] *= 0.5


def make_the_rate_a_tensor(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = torch.tensor(0.3)


def forget_the_state(loop: Loop) -> None:
    loop.optimizer.state.clear()


def replace_a_slot(loop: Loop) -> None:
    for slots in [*loop.optimizer.state.values()][:1]:
        slots["exp_avg"] = torch.ones_like(slots["exp_avg"])


def count_in_numbers(loop: Loop) -> None:
    for slots in loop.optimizer.state.values():
        slots["count"] = slots.get("count", 0) + 1


def nest_some_state(loop: Loop) -> None:
    for slots in [*loop.optimizer.state.values()][:1]:
        slots["more"] = {"deep": torch.ones(1), "n": 1}


def change_the_others(loop: Loop) -> None:
    loop.other = {"n": loop.other["n"] + 1, "t": torch.rand(2)}


def more_of_the_others(loop: Loop) -> None:
    loop.other[f"t{len(loop.other)}"] = torch.ones(1)


def another_optimizer(loop: Loop) -> None:
    loop.optimizer = torch.optim.SGD(loop.model.parameters(), lr=0.1, momentum=0.9)


CHANGES = [
    step, replace_a_parameter, replace_one_that_is_equal, replace_a_buffer, replace_a_layer,
    replace_an_inner_layer, add_a_layer, remove_a_bias, tie, put_other_data_in, turn_the_data, make_it_double,
    hide_a_buffer, hook_the_state, add_a_group, change_the_rate, make_the_rate_a_tensor, forget_the_state,
    replace_a_slot, count_in_numbers, nest_some_state, change_the_others, more_of_the_others,
    another_optimizer,
]  # fmt: skip


def check(kept: Kept, loop: Loop) -> None:
    wanted, found = flatten(loop.objects), kept.flatten(loop.objects)
    assert wanted.tensors.keys() == found.tensors.keys()
    for path, one in wanted.tensors.items():
        assert found.tensors[path].data_ptr() == one.data_ptr(), path
        assert (found.tensors[path].shape, found.tensors[path].dtype) == (one.shape, one.dtype), path
        assert found.tensors[path].stride() == one.stride(), path
    assert wanted.values == found.values


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_each_change_is_noticed(change) -> None:
    loop, kept = Loop(), Kept()
    step(loop)
    for _ in range(2):
        check(kept, loop)
        check(kept, loop)
        change(loop)
    check(kept, loop)


@settings(max_examples=15)
@given(st.lists(st.sampled_from(CHANGES[1:]), max_size=8))
def test_any_changes_are_noticed(changes) -> None:
    loop, kept = Loop(), Kept()
    step(loop)
    check(kept, loop)
    for change in changes:
        change(loop)
        check(kept, loop)


def test_nothing_is_walked_again_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, kept = Loop(), Kept()
    step(loop)
    first = kept.flatten(loop.objects)
    step(loop)
    loop.other["t"] = torch.rand(2)
    monkeypatch.setattr(type(loop.model), "named_parameters", None)
    again = kept.flatten(loop.objects)
    assert again.generation == first.generation
    assert again.fresh == {"other"}


def test_a_model_that_is_dropped_is_not_held(open_checkpointer) -> None:
    loop, checkpointer = Loop(), open_checkpointer()
    step(loop)
    checkpointer.save(1, model=loop.model, optimizer=loop.optimizer)
    checkpointer.wait()
    weight, model = weakref.ref(loop.model[0].weight), weakref.ref(loop.model)
    del loop
    gc.collect()
    assert model() is None
    assert weight() is None


@pytest.mark.parametrize("change", CHANGES, ids=lambda one: one.__name__)
def test_what_changed_between_saves_is_what_is_saved(open_checkpointer, change) -> None:
    loop = Loop()
    with open_checkpointer(overlap=True) as checkpointer:
        for number in range(3):
            step(loop)
            if number == 2:
                change(loop)
            checkpointer.save(number, **loop.objects)
            wanted = {path_name(path): one.clone() for path, one in flatten(loop.objects).tensors.items()}
            if number < 2:
                loop.optimizer.step()
            checkpointer.wait()
        found = {path_name(path): one for path, one in flatten(checkpointer.load()).tensors.items()}
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert torch.equal(found[name], one), name


class Long(torch.nn.Module):
    """A queue, say: it has a length, and now that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(3))

    def __len__(self) -> int:
        return 0


def conjugated() -> torch.nn.Module:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64).conj())
    return model


def negated() -> torch.nn.Module:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64).conj().imag)
    return model


def patched() -> torch.nn.Module:
    """Its state is made by what was put on the one instance."""
    model = torch.nn.Linear(3, 1, bias=False)

    def save_twice(state: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        state[f"{prefix}weight"] = 2 * model.weight.detach()

    model._save_to_state_dict = save_twice
    return model


SHAPES = {
    "a compiled child, which cannot say its length": lambda: torch.compile(
        torch.nn.Linear(3, 1, bias=False), backend="eager"
    ),
    "a length of none": Long,
    "conjugated": conjugated,
    "negated": negated,
    "a method of the instance": patched,
    "weight norm": lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 1, bias=False)),
    "an inner list": lambda: torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(3))]),
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("overlap", [False, True], ids=["at once", "behind"])
def test_of_a_module_of_any_shape_the_newest_values_are_saved(open_checkpointer, shape, overlap) -> None:
    """Changed in place and, the third time, replaced: what was kept of the save before is not saved."""
    model = torch.nn.Sequential(SHAPES[shape]())
    checkpointer = open_checkpointer(overlap=overlap)
    for step in range(1, 5):
        for owner in list(model.modules()):
            for name, one in list(owner.named_parameters(recurse=False)):
                with torch.no_grad():
                    one.add_(step)
                if step == 3 and "parametrizations" not in type(owner).__module__:
                    setattr(owner, name, torch.nn.Parameter(one.detach() + 1))
        checkpointer.save(step, model=model)
        checkpointer.wait()
        wanted, found = flatten({"model": model}), flatten({"model": checkpointer.load()["model"]})
        assert wanted.tensors.keys() == found.tensors.keys()
        for path, one in wanted.tensors.items():
            assert torch.equal(found.tensors[path], one.resolve_conj().resolve_neg()), (step, path)
