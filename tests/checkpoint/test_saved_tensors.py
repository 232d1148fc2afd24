"""What a checkpoint holds by name, and its tensors read into others: as the arrays they were cut from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.saved.layout import Box, Part, Piece, path_name, place
from stoker.checkpoint.saved.values import encode
from stoker.checkpoint.snapshot.tensors import (
    Saved,
    find_piece,
    new_tensor,
    read_tensors,
    tensor_metadata,
)
from stoker.errors import UsageError


@dataclass
class Held:
    """As much of a checkpoint as is asked here: parts, and their files in memory."""

    parts: Sequence[Part]
    files: Sequence[bytes] = ()

    def pieces(self) -> Iterator[tuple[int, Piece]]:
        for part in self.parts:
            for piece in part.pieces:
                yield part.rank, piece

    def read(self, stretches: Sequence[Any]) -> None:
        for one in stretches:
            data = bytearray(self.files[one.rank][one.start : one.stop])
            middle = len(data) // 2
            for at, some in ((0, data[:middle]), (middle, data[middle:])):
                if some:
                    one.receive(at, memoryview(some))


def part(rank: int, boxes: Sequence[Box] = (), **more: Any) -> Part:
    pieces, size = place(boxes)
    return Part(rank=rank, save="s", bytes=size, pieces=pieces, chunks=(), **more)


def box(path: tuple[Any, ...], shape=(2,), offsets=None, sizes=None, dtype: str = "int64") -> Box:
    return Box(
        path=path, dtype=dtype, shape=shape, offsets=offsets or (0,) * len(shape), sizes=sizes or shape
    )


def values(**named: Any) -> tuple[Any, ...]:
    return tuple((tuple(name.split("__")), encode(one, name=name)) for name, one in named.items())


# --- reading --------------------------------------------------------------------------------------


@st.composite
def cut(draw: st.DrawFn) -> tuple[np.ndarray, Held]:
    """An array, cut along its axes into boxes that two ranks wrote."""
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    dtype = draw(st.sampled_from(["int64", "float32", "complex64"]))
    truth = np.arange(1, int(np.prod(shape)) + 1).reshape(shape).astype(dtype)
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 3))):
        axis, at = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(boxes) - 1))
        offsets, sizes = boxes.pop(at)
        here = draw(st.integers(0, sizes[axis]))
        for begin, size in ((0, here), (here, sizes[axis] - here)):
            if size:
                moved = tuple(o + begin * (n == axis) for n, o in enumerate(offsets))
                boxes.append((moved, tuple(size if n == axis else s for n, s in enumerate(sizes))))
    other = box(("m", "other"), shape=(3,))
    mine: list[list[Box]] = [[], [other]]
    for number, (offsets, sizes) in enumerate(boxes):
        mine[number % 2].append(box(("m", "w"), shape, offsets, sizes, dtype))
    parts, files = [part(rank, some) for rank, some in enumerate(mine)], []
    for one in parts:
        file = bytearray(one.bytes)
        for piece in one.pieces:
            where = tuple(slice(o, o + n) for o, n in zip(piece.box.offsets, piece.box.sizes, strict=True))
            data = np.array([7, 8, 9]) if piece.box.path[1] == "other" else truth[where]
            file[piece.at : piece.at + piece.box.bytes] = np.ascontiguousarray(data).tobytes()
        files.append(bytes(file))
    return truth, Held(parts, files)


@settings(max_examples=100)
@given(cut(), st.sampled_from(["same", "float", "turned", "larger", "conjugated", "negated"]), st.data())
def test_a_tensor_is_read_from_its_pieces_into_whatever_takes_it(
    made, kind: str, data: st.DataObject
) -> None:
    truth, held = made
    saved = Saved(held, rank=0)  # type: ignore[arg-type]
    own = getattr(torch, str(truth.dtype))
    expected, shape = truth.astype(np.complex64), list(truth.shape)
    if kind == "larger":
        shape = [size + data.draw(st.integers(0, 2)) for size in shape]
        expected = np.full(shape, -1.0 + 0j)
        expected[tuple(slice(0, size) for size in truth.shape)] = truth
    target = torch.full(shape, -1).to(torch.complex128 if kind == "float" else own)
    if kind == "turned":
        target = torch.full(shape[::-1], -1).to(own).permute(*range(len(shape))[::-1])
    if kind == "conjugated":
        target = torch.full(shape, -1).to(torch.complex64).conj()
    if kind == "negated" and own is not torch.complex64:
        target = torch.full(shape, -1).to(torch.complex64).conj().imag
    others = torch.zeros(3, dtype=torch.int64)
    read_tensors(saved, {("m", "w"): target, ("m", "other"): others})
    assert np.array_equal(target.resolve_conj().resolve_neg().to(torch.complex64).numpy(), expected)
    assert others.tolist() == [7, 8, 9]
    assert sorted(saved.pieces) == ["m.other", "m.w"]
    assert saved.box("m.w").shape == truth.shape
    described = tensor_metadata(saved).state_dict_metadata["m.w"]
    assert tuple(described.size) == truth.shape
    assert described.properties.dtype == own
    for number, (rank, piece) in enumerate(saved.pieces["m.w"]):
        index = type("Index", (), {"fqn": "m.w", "offset": torch.Size(piece.box.offsets)})()
        assert find_piece(saved, index) == (rank, piece)
        assert tuple(described.chunks[number].offsets) == piece.box.offsets
        assert tuple(described.chunks[number].sizes) == piece.box.sizes


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([(), (3,), (2, 2)]))
def test_rows_are_read_to_where_they_belong_and_nothing_lies_beside(
    counts: list[int], inner: tuple[int, ...]
) -> None:
    """A restore must not need the memory twice."""
    truth, boxes, first = np.arange(sum(counts) * int(np.prod(inner))).reshape(-1, *inner), [], 0
    for count in counts:
        offsets, sizes = (first, *(0 for _ in inner)), (count, *inner)
        boxes.append(box(("m", "w"), truth.shape, offsets, sizes))
        first += count
    one = part(0, boxes)
    file = bytearray(one.bytes)
    for piece in one.pieces:
        start = piece.box.offsets[0]
        file[piece.at : piece.at + piece.box.bytes] = truth[start : start + piece.box.sizes[0]].tobytes()
    target = torch.zeros(truth.shape, dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("stoker.checkpoint.snapshot.tensors.new_tensor", None)
        read_tensors(Saved(Held([one], [bytes(file)]), rank=0), {("m", "w"): target})  # type: ignore[arg-type]
    assert np.array_equal(target.numpy(), truth)


def test_what_has_no_memory_to_be_restored_into_is_named() -> None:
    saved = Saved(Held([part(0, [box(("m", "w"))])], [bytes(64)]), rank=0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"m\.w has no memory yet.*meta"):
        read_tensors(saved, {("m", "w"): torch.empty(2, dtype=torch.int64, device="meta")})
    made = new_tensor(box(("m", "w"), shape=(3, 1)))
    assert (made.shape, made.dtype, made.device.type) == ((3, 1), torch.int64, "cpu")


# --- by name --------------------------------------------------------------------------------------


def job() -> Held:
    """Two ranks: a model of which one tensor is apart, an optimizer, values that differ."""
    first = [box(("m", "w")), box(("m@0", "v")), box(("opt", "state", "w", "exp"))]
    return Held(
        [
            part(
                0,
                first,
                own=((("rng",), 5),),
                values=values(
                    a__n=1, b={}, c=3, opt__param_groups__0__params=["w"], opt__param_groups__0__lr=0.1
                ),
            ),
            part(
                1,
                [box(("m@1", "v"))],
                own=((("rng",), 6),),
                values=values(a__n=2, b__x=4, opt__param_groups__0__params=["v", "w"], opt__state__v__step=9),
            ),
        ]
    )


@pytest.mark.parametrize(("rank", "size", "own"), [(0, 0, 0), (1, 2, 1), (1, 3, None), (2, 2, None)])
def test_a_rank_sees_its_own_version_if_there_are_as_many(rank: int, size: int, own: int | None) -> None:
    saved = Saved(job(), rank=rank, size=size)  # type: ignore[arg-type]
    noted: Any = type("Said", (), {"apart": []})()
    if own is None:
        assert saved.apart == {("m", "v"): "m@0.v, m@1.v"}
        assert saved.note_apart(("m", "v"), noted)
        assert noted.apart == [
            "m.v was not the same on all ranks when it was saved, and there were 2 of them: "
            "the checkpoint has m@0.v, m@1.v"
        ]
        assert "m.v" not in saved.pieces
    else:
        assert saved.apart == {}
        assert not saved.note_apart(("m", "v"), noted)
        assert [owner for owner, _ in saved.pieces["m.v"]] == [own]
        assert saved.box("m.v").path == ("m", "v")
    assert saved.own == ({("rng",): 5 + rank} if rank < 2 else {})
    assert ("m", "w") in saved.tensor_paths("m")


def test_a_rank_wants_its_own_values_back_and_those_of_the_first_where_it_had_none() -> None:
    first, second, third = (Saved(job(), rank=rank) for rank in range(3))  # type: ignore[arg-type]
    assert [one.values_under("a") for one in (first, second, third)] == [{("a", "n"): n} for n in (1, 2, 1)]
    assert first.values_under("b") == second.values_under("b") == {("b", "x"): 4}
    assert second.values_under("c") == {("c",): 3}
    assert first.extras({"a": None, "opt": None}) == {"b": {"x": 4}, "c": 3}
    assert first.extras({}) == {"a": {"n": 1}, "b": {"x": 4}, "c": 3} | {
        name: one for name, one in first.extras({}).items() if name == "opt"
    }


def test_what_a_rank_did_not_save_of_an_optimizer_it_finds_with_the_others() -> None:
    for rank, params in ((0, ["w", "v"]), (1, ["v", "w"])):
        found = Saved(job(), rank=rank).optimizer_values("opt")  # type: ignore[arg-type]
        assert found[("opt", "param_groups", "0", "params")] == params
        assert found[("opt", "param_groups", "0", "lr")] == 0.1
        assert found[("opt", "state", "v", "step")] == 9


@pytest.mark.parametrize(
    ("rename", "names", "params"),
    [
        (lambda name: name, {"m.w", "m.v", "opt.state.w.exp"}, ["w"]),
        (
            lambda name: name.replace("m.", "n.layer."),
            {"n.layer.w", "n.layer.v", "opt.state.layer.w.exp"},
            ["layer.w"],
        ),
        (lambda name: None if name == "m.w" else name, {"m.v"}, []),
        (lambda name: name.replace("a.", "z."), {"m.w", "m.v", "opt.state.w.exp"}, ["w"]),
    ],
)
def test_names_are_moved_also_in_the_state_of_an_optimizer(
    rename, names: set[str], params: list[str]
) -> None:
    saved = Saved(job(), rank=0, rename=rename)  # type: ignore[arg-type]
    assert set(saved.pieces) == {*names, "m@1.v"}
    assert saved.values_under("opt")[("opt", "param_groups", "0", "params")] == params
    assert all(path_name(saved.box(name).path) == name for name in saved.pieces)
    assert (("z", "n") in saved.values) == (rename("a.n") == "z.n")


STEPS = st.text("xy.", min_size=1, max_size=4)


@given(
    st.lists(st.lists(STEPS, min_size=2, max_size=3), min_size=1, max_size=4),
    st.sampled_from(["b", "b.c"]),
)
def test_an_object_that_is_renamed_keeps_the_steps_of_its_paths(paths: list[list[str]], name: str) -> None:
    """Also those that have dots in them. A path of two steps is a parameter's, whose name is one step."""
    values = tuple((("a", *steps), 1) for steps in paths)
    saved = Saved(
        Held([part(0, [box(("z", "w"))], values=values)], [bytes(64)]),  # type: ignore[arg-type]
        rank=0,
        rename=lambda one: name + one[1:] if one[0] == "a" else one,
    )
    assert set(saved.values) == {(*name.split("."), *steps) for steps in paths}
