"""Who writes what, what lies where, what plain values become: for any state."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.saved.apart import marked, unmarked
from stoker.checkpoint.saved.cover import check_parts
from stoker.checkpoint.saved.layout import ALIGNMENT, Box, Part, part_from_json, place
from stoker.checkpoint.saved.values import decode, encode
from stoker.checkpoint.snapshot.claims import SLAB_BYTES, Claim, Deal, deal, slab, told_apart
from stoker.errors import CheckpointError

shapes = st.lists(st.integers(1, 9000), max_size=3).map(tuple).filter(lambda one: math.prod(one) < 10**8)


def whole(name: str, shape: tuple[int, ...]) -> Box:
    return Box(path=("model", name), dtype="float32", shape=shape, offsets=(0,) * len(shape), sizes=shape)


def written(held: list[list[Claim]], dealt: list[list[Deal]]) -> list[list[Box]]:
    """The boxes of each rank's file."""
    return [[slab(held[rank][one.claim], one) for one in mine if one.rows] for rank, mine in enumerate(dealt)]


@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 9))
def test_replicated_tensors_are_written_once_and_whole(found: list[tuple[int, ...]], ranks: int) -> None:
    boxes = [whole(str(at), shape) for at, shape in enumerate(found)]
    held = [[Claim(box=box) for box in boxes]] * ranks
    dealt = written(held, deal(held))
    parts = [
        Part(rank=rank, save="a", bytes=size, pieces=pieces, chunks=())
        for rank, (pieces, size) in enumerate(map(place, dealt))
    ]
    check_parts(parts, save="a")  # every tensor, whole, and no piece twice
    loads = [sum(box.bytes for box in mine) for mine in dealt]
    rows = [box.bytes // (box.shape or (1,))[0] for box in boxes]  # a row is not cut
    largest = max(min(box.bytes, 2 * max(SLAB_BYTES, row)) for box, row in zip(boxes, rows, strict=True))
    assert max(loads) - min(loads) <= max(largest, max(box.bytes for box in boxes) / ranks + SLAB_BYTES)


@given(st.integers(1, 8), st.integers(1, 300))
def test_what_one_rank_holds_it_writes_itself(ranks: int, rows: int) -> None:
    tensor = whole("w", (rows * ranks, 3))
    boxes = [replace(tensor, offsets=(rows * rank, 0), sizes=(rows, 3)) for rank in range(ranks)]
    held = [[Claim(box=box, mesh=tuple(range(ranks)))] for box in boxes]
    assert written(held, deal(held)) == [[box] for box in boxes]


# --- meshes and placements ------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int | None, ...]]:
    """A tensor's shape, a mesh's, and for each axis of the mesh the axis that it cuts, or none."""
    shape = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    mesh = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple))
    cuts = st.one_of(st.none(), st.integers(0, len(shape) - 1))
    return shape, mesh, tuple(draw(cuts) for _ in mesh)


def held_by(rank: int, truth: np.ndarray, mesh: tuple[int, ...], cuts: tuple[int | None, ...]):
    """What a rank holds, as torch.chunk cuts it, and where that begins."""
    place_, offsets = np.unravel_index(rank, mesh), [0] * truth.ndim
    for at, (size, cut) in enumerate(zip(mesh, cuts, strict=True)):
        if cut is not None:
            step = -(-truth.shape[cut] // size)
            start = min(int(place_[at]) * step, truth.shape[cut])
            stop = min(start + step, truth.shape[cut])
            truth = truth.take(range(start, stop), axis=cut)
            offsets[cut] += start
    return truth, tuple(offsets)


def claims_for(name: str, truth: np.ndarray, mesh, cuts, *, first: int = 0) -> list[tuple[Claim, np.ndarray]]:
    ranks = tuple(range(first, first + math.prod(mesh)))
    found = []
    for rank in range(len(ranks)):
        here, offsets = held_by(rank, truth, mesh, cuts)
        box = Box(path=("model", name), dtype="int64", shape=truth.shape, offsets=offsets, sizes=here.shape)
        found.append((Claim(box=box, mesh=ranks, digest=hash(here.tobytes()) & 0xFFFFFFFF), here))
    return found


def put_together(held: list[list[tuple[Claim, np.ndarray]]], *, slab_bytes: int) -> dict[str, np.ndarray]:
    """Deal, write, and read back: every tensor by its name; -1 where nothing was written."""
    claims = [[claim for claim, _ in mine] for mine in held]
    found: dict[str, np.ndarray] = {}
    for rank, mine in enumerate(deal(claims, slab_bytes=slab_bytes)):
        for one in mine:
            box, here = slab(claims[rank][one.claim], one), held[rank][one.claim][1]
            rows = here if one.rows < 0 else here[one.row : one.row + one.rows]
            target = found.setdefault(box.name, np.full(box.shape, -1))
            where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
            assert (target[where] == -1).all(), "an element was written twice"
            target[where] = rows
    return found


@settings(max_examples=150)
@given(meshes(), st.sampled_from([8, 24, 100, 1 << 20]))
def test_any_mesh_and_placement_is_written_once_and_as_it_is(given_mesh, slab_bytes: int) -> None:
    shape, mesh, cuts = given_mesh
    truth = np.arange(math.prod(shape)).reshape(shape)
    held = [[pair] if pair[1].size else [] for pair in claims_for("w", truth, mesh, cuts)]
    found = put_together(held, slab_bytes=slab_bytes)
    assert set(found) == {"model.w"}
    assert np.array_equal(found["model.w"], truth)


@given(meshes(), st.booleans())
def test_stages_with_equal_names_are_saved_apart_unless_they_are_equal(given_mesh, alike: bool) -> None:
    shape, mesh, cuts = given_mesh
    truth, ranks = np.arange(math.prod(shape)).reshape(shape), math.prod(mesh)
    other = truth if alike else truth + 1
    held = [
        [pair] if pair[1].size else []
        for first, one in ((0, truth), (ranks, other))
        for pair in claims_for("w", one, mesh, cuts, first=first)
    ]
    found = put_together(held, slab_bytes=24)
    if alike:
        assert np.array_equal(found.pop("model.w"), truth)
    else:
        first, second = marked(("model", "w"), range(ranks)), marked(("model", "w"), range(ranks, 2 * ranks))
        assert np.array_equal(found.pop(".".join(first)), truth)
        assert np.array_equal(found.pop(".".join(second)), other)
    assert not found


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_mark_names_its_ranks(ranks: set[int]) -> None:
    path, back = unmarked(marked(("model", "a@b"), ranks))
    assert (path, set(back)) == (("model", "a@b"), ranks)


def test_a_mark_is_short_for_many_ranks() -> None:
    assert marked(("m", "w"), range(1000))[0] == "m@0-999"
    assert marked(("m", "w"), range(1, 1000, 8))[0] == "m@1-993:8"
    assert marked(("m", "w"), [3])[0] == "m@3"


def test_replicas_that_differ_are_refused_with_both_ranks() -> None:
    box = whole("w", (4, 4))
    held = [[Claim(box=box, mesh=(0, 1, 2), digest=digest)] for digest in (5, 5, 6)]
    with pytest.raises(CheckpointError, match=r"ranks 0 and 2 say that they hold model\.w alike"):
        deal(held)
    dealt = written(held, deal(held, trust=True, slab_bytes=16))
    assert sorted(box.name for mine in dealt[:2] for box in mine) == ["model.w"] * 2
    assert dealt[2] == []  # no slab of another's


@pytest.mark.parametrize(
    ("boxes", "said"),
    [
        ([((0,), (3,)), ((2,), (2,))], r"two pieces of model\.w overlap \(ranks \[0, 1\]"),
        ([((0,), (2,)), ((3,), (1,))], r"no rank saved all of model\.w: 3 of 4 elements"),
        ([((0,), (2,)), ((2,), (3,))], r"a piece of model\.w lies outside of it"),
    ],
)
def test_boxes_that_do_not_cover_a_tensor_once_are_refused(boxes, said: str) -> None:
    shape = whole("w", (4,))
    held = [[Claim(box=replace(shape, offsets=o, sizes=n), mesh=(0, 1))] for o, n in boxes]
    with pytest.raises(CheckpointError, match=said):
        deal(held)


def test_buffers_that_drifted_keep_the_first_ranks_under_their_own_name() -> None:
    held = [[Claim(box=whole("mean", (4,)), digest=digest, free=True)] for digest in (1, 2, 2)]
    names = [[box.name for box in mine] for mine in written(held, deal(held))]
    assert names == [["model.mean"], ["model@1-2.mean"], []]


def test_every_rank_knows_which_of_its_tensors_differ_though_another_writes_them() -> None:
    held = [
        [Claim(box=whole("w", (4,)), digest=digest), Claim(box=whole("v", (4,)))] for digest in (1, 1, 2, 2)
    ]
    held[3].append(Claim(box=whole("own", (4,))))
    assert told_apart(held, deal(held)) == [([1], [0])] * 4


def test_what_only_some_ranks_tie_is_written_for_itself() -> None:
    a, b = whole("a", (4,)), whole("b", (4,))
    tied, parted = [Claim(box=a), Claim(box=b, alias=0)], [Claim(box=a), Claim(box=b)]
    names = sorted(box.name for mine in written([tied, parted], deal([tied, parted])) for box in mine)
    assert names == ["model.a", "model.b"]
    assert [[box.name for box in mine] for mine in written([tied], deal([tied]))] == [["model.a"]]


# --- files and values -----------------------------------------------------------------------------


@given(st.lists(shapes, max_size=9))
def test_pieces_lie_aligned_one_after_another(found: list[tuple[int, ...]]) -> None:
    pieces, size = place([whole(str(at), shape) for at, shape in enumerate(found)])
    end = 0
    for piece in pieces:
        assert piece.at % ALIGNMENT == 0
        assert end <= piece.at < end + ALIGNMENT
        end = piece.at + piece.box.bytes
    assert end <= size < end + ALIGNMENT


keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner), st.sets(st.integers())
    ),
    max_leaves=20,
)


@pytest.mark.long
@settings(max_examples=30)
@given(values)
def test_a_plain_value_comes_back_as_it_was(value: object) -> None:
    back = decode(json.loads(json.dumps(encode(value, name="x"))))
    assert back == value
    assert type(back) is type(value)


@given(shapes, st.lists(st.one_of(st.text(), st.integers(), st.tuples(st.just("k"), keys)), min_size=1))
def test_a_part_comes_back_from_its_json(shape: tuple[int, ...], path: list[object]) -> None:
    box = replace(whole("w", shape), path=tuple(path))
    pieces, size = place([box])
    values = ((tuple(path), 1),)
    part = Part(rank=3, save="s", bytes=size, pieces=pieces, chunks=(2**64 - 1, 0), values=values)
    assert part_from_json(part.to_json()) == part
