"""Checkpoints for others: safetensors, and two compared."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from stoker.checkpoint.saved.export import Tensors, diff, export, named
from stoker.errors import UsageError


@pytest.fixture
def model() -> torch.nn.Module:
    torch.manual_seed(0)
    model = torch.nn.ModuleDict(
        {
            "embed": torch.nn.Embedding(30, 8),
            "norm": torch.nn.LayerNorm(8).bfloat16(),
            "head": torch.nn.Linear(8, 30, bias=False),
        }
    )
    model["head"].weight = model["embed"].weight
    return model


@pytest.fixture
def saved(model, open_checkpointer):
    checkpointer = open_checkpointer()
    checkpointer.save(1, model=model, other={"x": torch.ones(3)})
    checkpointer.wait()
    return checkpointer.latest()


def test_stages_with_equal_names_are_not_exported_as_one_model() -> None:
    apart = ["model@0.w", "model@1.w"]
    with pytest.raises(UsageError, match=r"model\.w was not the same on all ranks .* has model@0\.w"):
        named(["model.v"], "model.", known=[*apart, "model.v"])
    assert named(apart, "model@1.", known=apart) == ["model@1.w"]
    buffer = [*apart, "model.w"]  # the first rank's is the one
    assert named(buffer, "model.", known=buffer) == ["model.w"]


def test_an_export_is_the_state_dict_with_tied_weights_once(saved, model, tmp_path: Path) -> None:
    (path,) = export(saved, tmp_path / "out")
    found = load_file(path)
    assert path.name == "model.safetensors"
    assert found.keys() == model.state_dict().keys() - {"head.weight"}
    assert all(torch.equal(found[key], model.state_dict()[key]) for key in found)


def test_a_large_export_is_cut_and_has_an_index(saved, model, tmp_path: Path) -> None:
    paths = export(saved, tmp_path / "out", shard_bytes=100)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert [path.name for path in paths] == [f"model-0000{at}-of-00002.safetensors" for at in (1, 2)]
    for name, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "out" / file)[name], model.state_dict()[name])


@pytest.mark.parametrize("at", range(4))
def test_an_empty_tensor_hides_no_other(open_checkpointer, tmp_path: Path, at: int) -> None:
    names = ["a", "b", "c"]
    names.insert(at, "empty")
    state = {name: torch.empty(0, 4) if name == "empty" else torch.rand(3) for name in names}
    checkpointer = open_checkpointer()
    checkpointer.save(1, model={**state, "again": state["a"]})
    checkpointer.wait()
    assert Tensors(checkpointer.latest()).names() == [f"model.{name}" for name in names]
    (path,) = export(checkpointer.latest(), tmp_path / "out")
    found = load_file(path)
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in names)


def test_a_prefix_without_tensors_is_refused(saved, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tensors whose names begin with 'nonsense'"):
        export(saved, tmp_path / "out", prefix="nonsense")


def test_a_difference_is_named_and_measured(open_checkpointer) -> None:
    checkpointer = open_checkpointer()
    state = {"same": torch.arange(5), "w": torch.ones(4, 4, dtype=torch.bfloat16), "gone": torch.ones(1)}
    checkpointer.save(1, state=state, epoch=1)
    checkpointer.wait()
    one = checkpointer.latest()
    other = {**state, "w": state["w"].clone(), "new": torch.ones(2)}
    other["w"][1, 2] += 0.5
    del other["gone"]
    checkpointer.save(2, state=other, epoch=2)
    checkpointer.wait()
    two = checkpointer.latest()
    assert [(each.name, each.what, each.most) for each in diff(one, two)] == [
        ("state.gone", f"only in {one.name}", None),
        ("state.new", f"only in {two.name}", None),
        ("state.w", "1 of 16 elements differ", 0.5),
        ("epoch", "1 against 2", None),
    ]
    assert diff(one, one) == []


def saved_twice(open_checkpointer, first: dict, second: dict):
    checkpointer = open_checkpointer()
    found = []
    for step, objects in enumerate((first, second), 1):
        checkpointer.save(step, **objects)
        checkpointer.wait()
        found.append(checkpointer.latest())
    return found


def test_plain_values_are_compared_as_what_they_are(open_checkpointer) -> None:
    one, two = saved_twice(
        open_checkpointer,
        {"best": math.nan, "losses": [math.nan, 1.0], "gone": None, "same": None, "none": None},
        {"best": math.nan, "losses": [math.nan, 1.0], "new": None, "same": None, "none": 0},
    )
    assert [(each.name, each.what) for each in diff(one, two)] == [
        ("gone", f"only in {one.name}"),
        ("new", f"only in {two.name}"),
        ("none", "null against 0"),
    ]


@pytest.mark.parametrize(
    ("one", "two", "most"),
    [
        (torch.tensor([2**53, 5]), torch.tensor([2**53 + 1, 5]), 1.0),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), float(2**64 - 1)),
        (torch.tensor([-3], dtype=torch.int8), torch.tensor([120], dtype=torch.int8), 123.0),
        (torch.tensor([3], dtype=torch.uint8), torch.tensor([1], dtype=torch.uint8), 2.0),
        (torch.tensor([True, False]), torch.tensor([False, False]), 1.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([0.0, 1.0]), None),
        (torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([0.0, 1.0, 4.0]), 2.0),
    ],
    ids=str,
)
def test_the_largest_difference_is_the_true_one(open_checkpointer, one, two, most) -> None:
    (found,) = diff(*saved_twice(open_checkpointer, {"state": {"w": one}}, {"state": {"w": two}}))
    assert found.most == most
