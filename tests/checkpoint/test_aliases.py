"""Tensors that share their memory where they are restored: right, or refused; never the last one wins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stoker.errors import UsageError


def two(*, tied: bool) -> torch.nn.Sequential:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    if tied:
        model[1].weight = model[0].weight
    return model


def test_weights_that_were_not_tied_are_not_restored_into_tied_ones(open_checkpointer: Any) -> None:
    with open_checkpointer() as saver:
        saver.save(1, model=two(tied=False))
    with open_checkpointer() as saver, pytest.raises(UsageError, match="shares its memory here"):
        saver.restore(model=two(tied=True))


def test_one_of_two_that_are_tied_now_can_be_left_out(open_checkpointer: Any) -> None:
    before, now = two(tied=False), two(tied=True)
    with open_checkpointer() as saver:
        saver.save(1, model=before)
    with open_checkpointer() as saver:
        saver.restore(model=now, rename={"model.1.weight": None}, strict=False)
    assert torch.equal(now[1].weight, before[0].weight)


def test_equal_weights_that_were_not_tied_are_restored_into_tied_ones(open_checkpointer: Any) -> None:
    before, now = two(tied=False), two(tied=True)
    before[1].load_state_dict(before[0].state_dict())
    with open_checkpointer() as saver:
        saver.save(1, model=before)
    with open_checkpointer() as saver:
        saver.restore(model=now)
    assert torch.equal(now[1].weight, before[0].weight)


def test_tied_weights_are_read_once(open_checkpointer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = two(tied=True), two(tied=True)
    with open_checkpointer() as saver:
        saver.save(1, model=before)
    monkeypatch.setattr(torch.Tensor, "clone", None)  # nothing is read beside
    with open_checkpointer() as saver:
        saver.restore(model=now)
    assert torch.equal(now[1].weight, before[1].weight)
    assert now[1].weight is now[0].weight


def test_views_of_one_tensor_come_back_where_they_agree(open_checkpointer: Any) -> None:
    whole = torch.randn(6, 4)
    parts = {"whole": whole, "left": whole[:, :2], "right": whole[:, 2:], "top": whole[:3]}
    with open_checkpointer() as saver:
        saver.save(1, state=parts)
    fresh = torch.zeros(6, 4)
    with open_checkpointer() as saver:
        saver.restore(state={"whole": fresh, "left": fresh[:, :2], "right": fresh[:, 2:], "top": fresh[:3]})
    assert torch.equal(fresh, whole)


def test_columns_that_only_lie_between_each_other_share_nothing(open_checkpointer: Any) -> None:
    with open_checkpointer() as saver:
        saver.save(1, state={"left": torch.ones(6, 2), "right": torch.zeros(6, 2)})
    fresh = torch.full((6, 4), 9.0)
    with open_checkpointer() as saver:
        saver.restore(state={"left": fresh[:, :2], "right": fresh[:, 2:]})
    assert torch.equal(fresh, torch.tensor([1.0, 1.0, 0.0, 0.0]).expand(6, 4))


def test_views_that_disagree_are_refused(open_checkpointer: Any) -> None:
    with open_checkpointer() as saver:
        saver.save(1, state={"one": torch.arange(6.0), "other": torch.arange(6.0)})
    fresh = torch.zeros(10)
    with open_checkpointer() as saver, pytest.raises(UsageError, match="shares its memory here"):
        saver.restore(state={"one": fresh[:6], "other": fresh[4:]})


def test_an_expanded_tensor_is_refused_by_name(open_checkpointer: Any) -> None:
    with open_checkpointer() as saver:
        saver.save(1, state={"w": torch.randn(4, 6)})
    with open_checkpointer() as saver, pytest.raises(UsageError, match=r"state\.w is expanded"):
        saver.restore(state={"w": torch.zeros(4, 1).expand(4, 6)})


def test_a_tied_vocabulary_can_grow(open_checkpointer: Any) -> None:
    """Only a part of what has grown is read: the rest stays as it is."""
    with open_checkpointer() as saver:
        saver.save(1, state={"a": torch.ones(3), "b": torch.ones(3)}, model=two(tied=False))
    fresh = torch.full((5,), 7.0)
    holder = torch.nn.Module()
    holder.register_buffer("a", fresh)
    holder.register_buffer("b", fresh)
    with open_checkpointer() as saver:
        saver.restore(state=holder, mismatched="grow")
    assert holder.a.tolist() == [1.0, 1.0, 1.0, 7.0, 7.0]


def test_a_tensor_of_a_dictionary_that_was_not_saved_is_named(open_checkpointer: Any) -> None:
    with open_checkpointer() as saver:
        saver.save(1, state={"a": torch.ones(3)})
    state = {"a": torch.zeros(3), "b": torch.zeros(3)}
    with open_checkpointer() as saver:
        with pytest.raises(UsageError, match=r"state\.b"):
            saver.restore(state=state)
        assert saver.restore(state=state, strict=False).report.missing == ("state.b",)
    assert state["a"].tolist() == [1.0, 1.0, 1.0]
