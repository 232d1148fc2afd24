"""What one rank plans to write: what changes soon, what others may hold, what lies in one memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.saved.layout import ALIGNMENT, pieces_text
from stoker.checkpoint.snapshot.claims import deal
from stoker.checkpoint.snapshot.digest import digests
from stoker.checkpoint.snapshot.plan import (
    Plan,
    claims_of,
    local,
    loose_paths,
    make_plan,
    steady_paths,
)
from stoker.checkpoint.snapshot.state import Flat, flatten

PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias", "2.weight")


def model_of() -> torch.nn.Sequential:
    """With buffers, those of the batch norm."""
    layers = torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 3, bias=False)
    return torch.nn.Sequential(*layers)


def stepped(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(parameters)
    for one in parameters:
        one.grad = torch.ones_like(one)
    optimizer.step()
    return optimizer


def views(drawn: list[tuple[int, int, int]]) -> dict[str, torch.Tensor]:
    """Of one memory: from an element on, so many, each so far behind the one before."""
    memory = torch.arange(60.0)
    return {f"t{n}": memory[at : at + size * step : step] for n, (at, size, step) in enumerate(drawn)}


VIEWS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(1, 2)), min_size=1, max_size=6
).map(views)


def plan_of(
    flat: Flat, steady: set[Any], *, rank: int = 0, ranks: int = 1, slab_bytes: int = 1 << 20
) -> Plan:
    claims = claims_of(flat, {})
    return make_plan(flat, claims, deal([claims] * ranks, slab_bytes=slab_bytes)[rank], steady, checked=False)


# --- whose they are -------------------------------------------------------------------------------


@settings(max_examples=20)
@given(
    st.dictionaries(
        st.sampled_from(["model", "optimizer", "0.weight", "exp_avg"]),
        st.sampled_from([0, 1, (64 << 10) - 1, 64 << 10, (64 << 10) + 1]),
    ),
    st.integers(0, 1),
)
def test_what_may_cease_to_be_alike_is_small_and_no_models(sizes: dict[str, int], number: int) -> None:
    state = {name: torch.zeros(size, dtype=torch.uint8) for name, size in sizes.items()}
    model = model_of()
    objects = {
        "model": model,
        "optimizer": stepped([*model.parameters()]),
        "state": {"deep": [state][: number + 1]},
    }
    found = loose_paths(objects, flatten(objects))
    assert found == {("state", "deep", 0, name) for name, size in sizes.items() if size <= 64 << 10}


@given(st.sets(st.sampled_from(PARAMETERS), min_size=1))
def test_steady_is_what_an_optimizer_steps_and_its_own_state(names: set[str]) -> None:
    model = model_of()
    mine = {name: one for name, one in model.named_parameters() if name in names}
    objects = {"model": model, "optimizer": stepped([*mine.values()]), "state": {"t": torch.zeros(2)}}
    flat = flatten(objects)
    own = {path for path in flat.tensors if path[0] == "optimizer"}
    assert len(own) == 3 * len(names)
    assert steady_paths(objects, flat) == own | {("model", name) for name in names}
    assert steady_paths({"model": model}, flat) == set()


class Wrapper(torch.optim.Optimizer):
    """Around an optimizer, as accelerate's: it is no torch optimizer but by name, and calls no hooks."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.state, self.param_groups = inner, inner.state, inner.param_groups

    def step(self) -> None:
        self.inner.step()


def test_nobody_waits_for_a_step_that_calls_no_hooks() -> None:
    model = model_of()
    wrapped = Wrapper(stepped([*model.parameters()]))
    flat = flatten({"model": model, "optimizer": wrapped.inner})
    assert steady_paths({"model": model, "optimizer": wrapped}, flat) == set()


@given(tied=st.booleans(), ranks=st.integers(1, 3), check=st.booleans())
def test_a_claim_says_what_may_drift_and_what_its_bytes_are(tied: bool, ranks: int, check: bool) -> None:
    model = model_of()
    if tied:
        model[2].weight = model[0].weight
    objects = {"model": model, "state": {"running_mean": torch.ones(3)}}
    flat = flatten(objects)
    claims = {claim.box.path: claim for claim in claims_of(flat, objects, ranks=ranks, check=check)}
    assert list(claims) == list(flat.tensors)
    buffers = {("model", name) for name, _ in model.named_buffers()}
    assert {path for path, claim in claims.items() if claim.free} == buffers
    for path, claim in claims.items():
        (digest,) = digests([flat.tensors[path]]) if check and ranks > 1 else (0,)
        assert (claim.digest, claim.mesh) == (digest, ())
        second = tied and path == ("model", "2.weight")
        assert claim.alias == (list(claims).index(("model", "0.weight")) if second else -1)


# --- what is written ------------------------------------------------------------------------------


@given(VIEWS)
def test_views_of_the_same_elements_are_written_once_and_stand_for_each_other(
    some: dict[str, torch.Tensor],
) -> None:
    flat = flatten({"s": some})
    plan = plan_of(flat, set())
    firsts: dict[Any, str] = {}
    others: dict[str, str] = {}
    for name, one in some.items():
        key = (one.storage_offset(), one.shape, one.stride()) if one.numel() else name
        if firsts.setdefault(key, name) != name:
            others[name] = firsts[key]
    assert [write.path[1] for write in plan.writes] == list(firsts.values())
    assert {other: path[1] for path, more in plan.shared.items() for _, other in more} == others
    places = {piece.box.path[1]: piece.at for piece in plan.pieces}
    assert places.keys() == some.keys()
    assert all(places[other] == places[first] for other, first in others.items())
    assert plan.pieces_text == pieces_text(plan.pieces)
    for copied, write in zip(plan.tensors(flat), plan.writes, strict=True):
        assert torch.equal(copied, flat.tensors[write.path])


SIZES = st.lists(st.integers(0, 200), min_size=1, max_size=6)


@given(SIZES, st.sets(st.integers(0, 5)), st.integers(1, 300))
def test_what_may_change_soon_comes_first_and_no_group_holds_both(
    sizes: list[int], steady: set[int], cut: int
) -> None:
    flat = flatten({"s": {f"t{n}": torch.ones(size, dtype=torch.uint8) for n, size in enumerate(sizes)}})
    kept = {("s", f"t{n}") for n in steady}
    plan = plan_of(flat, kept)
    order = [write.path in kept for write in plan.writes]
    assert order == sorted(order)
    ends = [write.piece.at + write.piece.box.bytes for write in plan.writes]
    assert plan.hasty_bytes == max(
        [end for end, late in zip(ends, order, strict=True) if not late], default=0
    )
    assert plan.bytes == sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    assert plan.hasty == sum(write.piece.at < plan.hasty_bytes for write in plan.writes)
    groups, several = plan.groups(cut)
    moves = [move for group in groups for move in group]
    assert [sum(move.bytes for move in moves if move.write == n) for n in range(len(plan.writes))] == [
        write.piece.box.bytes for write in plan.writes
    ]
    assert several == {n for n in range(len(plan.writes)) if sum(move.write == n for move in moves) > 1}
    for group in groups:
        assert len({(move.at // cut, order[move.write]) for move in group}) == 1
    assert plan.groups(cut)[0] is groups


@given(
    rows=st.integers(0, 9), columns=st.integers(1, 3), ranks=st.integers(1, 4), slab_bytes=st.integers(1, 60)
)
def test_ranks_that_hold_one_tensor_write_it_together(
    rows: int, columns: int, ranks: int, slab_bytes: int
) -> None:
    whole = torch.arange(rows * columns).reshape(rows, columns)
    flat, found = flatten({"s": {"w": whole}}), torch.full_like(whole, -1)
    for rank in range(ranks):
        plan = plan_of(flat, set(), rank=rank, ranks=ranks, slab_bytes=slab_bytes)
        for write, one in zip(plan.writes, plan.tensors(flat), strict=True):
            assert tuple(one.shape) == write.piece.box.sizes
            start = write.piece.box.offsets[0]
            assert (found[start : start + len(one)] == -1).all()
            found[start : start + len(one)] = one
    assert torch.equal(found, whole)


# --- whether it still holds -----------------------------------------------------------------------


def another_shape(state: dict[str, torch.Tensor]) -> None:
    state["a"] = torch.zeros(3, 2)


def another_dtype(state: dict[str, torch.Tensor]) -> None:
    state["a"] = torch.zeros(2, 3, dtype=torch.int32)


def one_more(state: dict[str, torch.Tensor]) -> None:
    state["c"] = torch.zeros(1)


def one_less(state: dict[str, torch.Tensor]) -> None:
    del state["b"]


def another_name(state: dict[str, torch.Tensor]) -> None:
    state["c"] = state.pop("b")


def parted(state: dict[str, torch.Tensor]) -> None:
    state["b"] = state["b"].clone()


@pytest.mark.parametrize("change", [another_shape, another_dtype, one_more, one_less, another_name, parted])
@pytest.mark.parametrize("kept", [False, True], ids=["all looked at", "only what is fresh"])
def test_a_plan_fits_until_a_tensor_is_another_or_has_parted(change: Any, kept: bool) -> None:
    whole = torch.zeros(2, 3)
    state = {"a": whole, "b": whole.view(2, 3)}

    def flat() -> Flat:
        found = flatten({"s": state, "old": {"t": torch.zeros(2)}})
        if kept:
            found.generation, found.fresh = 7, frozenset(["s"])
        return found

    plan = plan_of(flat(), set())
    assert plan.fits(flat())
    state = {name: one.clone() for name, one in state.items()}
    state["b"] = state["a"]
    assert plan.fits(flat())  # other memory, the same shapes
    change(state)
    assert not plan.fits(flat())


@settings(max_examples=20)
@given(st.booleans(), st.booleans())
def test_what_torch_puts_off_is_done_before_bytes_are_copied(conjugated: bool, imaginary: bool) -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    lazy = plain.conj() if conjugated else plain
    lazy = lazy.imag if imaginary else lazy
    here = local(lazy)
    assert torch.equal(here, lazy)
    assert not here.is_conj()
    assert not here.is_neg()
    assert (here.data_ptr() == lazy.data_ptr()) == (not conjugated)
