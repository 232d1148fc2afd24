"""Loading into a model that has changed: other names, shapes, dtypes; and one report of what came of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from stoker.errors import UsageError


def trained(model: torch.nn.Module, kind: Any = torch.optim.AdamW) -> torch.optim.Optimizer:
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()
    return optimizer


def mean(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> torch.Tensor:
    return optimizer.state[parameter]["exp_avg"]


def model_of(*names: str, rows: int = 6) -> torch.nn.ModuleDict:
    return torch.nn.ModuleDict({name: torch.nn.Linear(4, rows) for name in names})


@pytest.fixture
def saved(open_checkpointer):
    """`saved(objects)` saves them, and gives a checkpointer on the folder."""

    def save(**objects: Any):
        checkpointer = open_checkpointer()
        checkpointer.save(7, **objects)
        checkpointer.wait()
        return checkpointer

    return save


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rename",
    [
        {"model.body": "model.trunk"},
        {"model.body.": "model.trunk."},
        lambda name: name.replace("model.body", "model.trunk"),
    ],
    ids=["mapping", "with dots", "function"],
)
def test_a_renamed_layer_takes_its_optimizer_state_along(saved, rename) -> None:
    model, other = model_of("body", "head"), model_of("trunk", "head")
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    restored = saved(model=model, optimizer=optimizer).restore(model=other, optimizer=back, rename=rename)
    assert torch.equal(model["body"].weight, other["trunk"].weight)
    for one, two in ((model["body"], other["trunk"]), (model["head"], other["head"])):
        assert torch.equal(mean(optimizer, one.weight), mean(back, two.weight))
    assert "model.trunk.weight" in restored.report.restored
    assert not restored.report.missing


def test_an_object_can_have_another_name(saved) -> None:
    model, other = model_of("body"), model_of("body")
    saved(teacher=model, note={"a": 3}).restore(student=other, rename={"teacher": "student"})
    assert torch.equal(model["body"].weight, other["body"].weight)


def test_what_is_renamed_to_none_is_left_out(saved) -> None:
    model, other = model_of("body", "head"), model_of("body")
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    checkpointer = saved(model=model, optimizer=optimizer)
    restored = checkpointer.restore(model=other, optimizer=back, rename={"model.head": None})
    assert torch.equal(mean(optimizer, model["body"].bias), mean(back, other["body"].bias))
    assert not any("head" in name for name in (*restored.report.restored, *restored.report.unexpected))


# --- shapes ---------------------------------------------------------------------------------------


def test_another_shape_is_refused_before_anything_is_touched(saved) -> None:
    model, other = model_of("body", "head"), model_of("body", "head")
    other["head"] = torch.nn.Linear(4, 9)
    before = other["body"].weight.clone()
    with pytest.raises(UsageError, match=r"model\.head\.weight is \(9, 4\) here, in .* \(6, 4\) \(2 such"):
        saved(model=model).restore(model=other)
    assert torch.equal(other["body"].weight, before)


def test_another_shape_can_be_skipped_with_its_optimizer_state(saved) -> None:
    model, other = model_of("body", "head"), model_of("body", "head")
    other["head"] = torch.nn.Linear(4, 9)
    before = other["head"].weight.clone()
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    restored = saved(model=model, optimizer=optimizer).restore(model=other, optimizer=back, mismatched="skip")
    assert torch.equal(model["body"].weight, other["body"].weight)
    assert torch.equal(other["head"].weight, before)
    assert other["head"].weight not in back.state
    assert torch.equal(mean(optimizer, model["body"].weight), mean(back, other["body"].weight))
    assert any(line.startswith("model.head.weight is (9, 4) here") for line in restored.report.mismatched)
    other["head"].weight.grad = torch.ones_like(other["head"].weight)
    back.step()  # begins anew for it


def test_a_vocabulary_can_grow_with_its_optimizer_state(saved) -> None:
    model, other = model_of("embed"), model_of("embed", rows=9)
    before = other["embed"].weight.clone()
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    restored = saved(model=model, optimizer=optimizer).restore(model=other, optimizer=back, mismatched="grow")
    assert torch.equal(other["embed"].weight[:6], model["embed"].weight)
    assert torch.equal(other["embed"].weight[6:], before[6:])
    state = back.state[other["embed"].weight]
    assert torch.equal(state["exp_avg"][:6], mean(optimizer, model["embed"].weight))
    assert bool((state["exp_avg"][6:] == 0).all())
    assert float(state["step"]) == 1
    assert len([line for line in restored.report.grown if line.startswith("model.embed")]) == 2


def test_what_is_smaller_now_cannot_grow(saved) -> None:
    with pytest.raises(UsageError, match=r"model\.a\.weight is \(5, 4\) here"):
        saved(model=model_of("a")).restore(model=model_of("a", rows=5), mismatched="grow")


@pytest.mark.parametrize("stepped", [False, True], ids=["new", "stepped"])
def test_an_optimizer_without_its_model_refuses_state_of_another_shape(saved, stepped: bool) -> None:
    optimizer = trained(torch.nn.Linear(4, 6))
    other = torch.nn.Linear(4, 9)
    back = trained(other) if stepped else torch.optim.AdamW(other.parameters())
    checkpointer = saved(optimizer=optimizer)
    with pytest.raises(UsageError, match=r"optimizer\.state\.0\.exp_avg.* is \(9, 4\) here, in .* \(6, 4\)"):
        checkpointer.restore(optimizer=back)


def test_state_that_has_fewer_axes_or_ones_belongs_to_its_parameter(saved) -> None:
    model, other = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6)
    optimizer, back = trained(model, torch.optim.Adafactor), torch.optim.Adafactor(other.parameters())
    saved(optimizer=optimizer).restore(optimizer=back)
    for slot, one in optimizer.state[model.weight].items():
        assert torch.equal(one, back.state[other.weight][slot]), slot


# --- dtypes ---------------------------------------------------------------------------------------


def test_lost_precision_is_said_unless_it_is_meant(saved) -> None:
    model, other = torch.nn.Linear(4, 6), torch.nn.Linear(4, 6).bfloat16()
    checkpointer = saved(model=model)
    with pytest.warns(RuntimeWarning, match=r"2 tensors lost precision .* model\.weight is float32"):
        checkpointer.restore(model=other)
    assert torch.equal(other.weight, model.weight.bfloat16())
    restored = checkpointer.restore(model=other, dtypes="cast")
    assert len(restored.report.cast) == 2
    with pytest.raises(UsageError, match=r"model\.weight is float32 in .*, bfloat16 here \(2 such tensors\)"):
        checkpointer.restore(model=other, dtypes="exact")


def test_more_precision_needs_no_word(saved) -> None:
    model, other = torch.nn.Linear(4, 6).bfloat16(), torch.nn.Linear(4, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        saved(model=model).restore(model=other)
    assert torch.equal(other.weight, model.weight.float())


@pytest.mark.parametrize(
    ("then", "now"),
    [
        (torch.float32, torch.int8),
        (torch.float32, torch.bool),
        (torch.complex64, torch.float32),
        (torch.int64, torch.int32),
        (torch.int64, torch.float64),
        (torch.uint8, torch.int8),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtypes", ["warn", "cast"])
def test_a_number_never_becomes_one_of_another_kind(saved, then, now, dtypes) -> None:
    def module(dtype: torch.dtype) -> torch.nn.Module:
        made = torch.nn.Module()
        made.register_buffer("scale", torch.tensor([300.7]).to(dtype))
        return made

    checkpointer = saved(model=module(then), state={"scale": torch.ones(1, dtype=then)})
    for given in ({"model": module(now)}, {"state": {"scale": torch.ones(1, dtype=now)}}):
        with pytest.raises(UsageError, match=r"scale is \w+ in .*, \w+ here"):
            checkpointer.restore(**given, dtypes=dtypes)


def test_whole_numbers_may_get_more_bits(saved) -> None:
    back = {"n": torch.zeros(3, dtype=torch.int64)}
    saved(state={"n": torch.arange(3, dtype=torch.int32)}).restore(state=back)
    assert torch.equal(back["n"], torch.arange(3))


# --- the report -----------------------------------------------------------------------------------


def test_the_report_names_what_was_and_was_not_restored(saved) -> None:
    model, other = model_of("a", "b"), model_of("b", "c")
    report = saved(model=model).restore(model=other, strict=False).report
    assert report.restored == ("model.b.weight", "model.b.bias")
    assert report.missing == ("model.c.weight", "model.c.bias")
    assert report.unexpected == ("model.a.weight", "model.a.bias")
    assert str(report) == "2 restored, 2 missing, 2 unexpected"


def test_an_optimizer_may_have_got_parameters_since(saved) -> None:
    model, other = model_of("a"), model_of("a", "b")
    optimizer, back = trained(model), torch.optim.AdamW(other.parameters())
    checkpointer = saved(model=model, optimizer=optimizer)
    with pytest.raises(UsageError, match=r"lacks 4 .* 'model\.b\.weight' first"):
        checkpointer.restore(model=other, optimizer=back)
    checkpointer.restore(model=other, optimizer=back, strict=False)
    assert torch.equal(mean(optimizer, model["a"].weight), mean(back, other["a"].weight))
    assert other["b"].weight not in back.state
    assert back.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("options", [{"mismatched": "shrink"}, {"dtypes": "any"}])
def test_an_unknown_policy_is_said(saved, options) -> None:
    with pytest.raises(UsageError, match="is unknown"):
        saved(model=model_of("a")).restore(model=model_of("a"), **options)
