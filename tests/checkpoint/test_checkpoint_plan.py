"""Who writes what, what lies where, what plain values become: for any state."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.saved.layout import ALIGNMENT, Box, Part, check_parts, part_from_json, place
from stoker.saved.values import decode, encode
from stoker.snapshot.plan import SLAB_BYTES, share

shapes = st.lists(st.integers(1, 9000), max_size=3).map(tuple).filter(lambda one: math.prod(one) < 10**8)


def whole(name: str, shape: tuple[int, ...]) -> Box:
    return Box(path=("model", name), dtype="float32", shape=shape, offsets=(0,) * len(shape), sizes=shape)


@given(st.lists(shapes, min_size=1, max_size=12), st.integers(1, 9))
def test_replicated_tensors_are_written_once_and_whole(found: list[tuple[int, ...]], ranks: int) -> None:
    boxes = [whole(str(at), shape) for at, shape in enumerate(found)]
    dealt = share([boxes] * ranks)
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
    held = [[replace(tensor, offsets=(rows * rank, 0), sizes=(rows, 3))] for rank in range(ranks)]
    assert share(held) == held


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
