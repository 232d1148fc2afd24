"""The format as other readers meet it, letter by letter; and the rules beside it against plain models."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.saved.apart import marked, unmarked
from stoker.checkpoint.saved.cover import check_names, check_parts, cover_fault
from stoker.checkpoint.saved.keep import KeepRules, spared
from stoker.checkpoint.saved.layout import (
    CHUNK_BYTES,
    Box,
    Manifest,
    Marks,
    Part,
    PartRecord,
    Piece,
    check_manifest,
    check_part,
    checkpoint_name,
    file_names,
    item_bytes,
    newest_first,
    parse_manifest,
    parse_part,
    part_name,
    part_record,
    path_name,
    place,
    sequence_of,
    step_of,
)
from stoker.checkpoint.saved.retention import Ours, expired, over_budget
from stoker.checkpoint.saved.values import decode, encode, encoded
from stoker.checkpoint.snapshot.aliases import shared
from stoker.checkpoint.snapshot.claims import Claim, deal, is_shared_by_all, told_apart
from stoker.checkpoint.snapshot.digest import card_digest, digests
from stoker.checkpoint.snapshot.plan import Write, _moves
from stoker.checkpoint.snapshot.state import (
    names_as_saved,
    nest,
    numbered_state,
    parameter_names,
    parameter_paths,
    random_state,
    set_random_state,
)
from stoker.checkpoint.snapshot.witness import Witness, comb, spots
from stoker.errors import BadCheckpointError, CheckpointError, UsageError

# --- names and files ------------------------------------------------------------------------------


def test_names_are_as_the_page_on_the_format_has_them() -> None:
    name = checkpoint_name(sequence=12, step=500, save="3f9ac2d1")
    assert name == "000012-step-000000500-3f9ac2d1"
    assert (sequence_of(name), step_of(name)) == (12, 500)
    assert (part_name(0, "bin"), part_name(12345, "json")) == ("part-00000.bin", "part-12345.json")
    for other in (".saving-" + name, name + "x", name[1:], "x" + name, name.replace("3f", "3F"), ""):
        assert (sequence_of(other), step_of(other)) == (None, -1)
    assert (sequence_of("1000000-step-1000000000-00000000"), step_of("1000000-step-1000000000-00000000")) == (
        10**6,
        10**9,
    )
    assert newest_first(["x", name, name.replace("12-", "13-"), name.replace("12-", "02-")]) == [
        name.replace("12-", "13-"),
        name,
        name.replace("12-", "02-"),
    ]
    assert path_name(("model", "a.b", 3, ("k", 7))) == "model.a.b.3.7"
    assert CHUNK_BYTES == 8 << 20


_BYTES = {
    16: "complex128",
    8: "float64 int64 uint64 complex64",
    4: "float32 int32 uint32 complex32",
    2: "float16 bfloat16 int16 uint16 bits16",
    1: "int8 uint8 bool bits8 float8_e5m2 int3 uint7 float4_e2m1fn_x2",
}


@pytest.mark.parametrize(("size", "names"), _BYTES.items())
def test_elements_are_as_large_as_torch_has_them(size: int, names: str) -> None:
    for name in names.split():
        assert item_bytes(name) == size
        if (hasattr(torch, name) and name[:3] not in ("bit", "int", "uin")) or name in (
            "int64",
            "int16",
            "uint8",
        ):
            assert getattr(torch, name).itemsize == size
    with pytest.raises(UsageError, match="float7 is a dtype"):
        item_bytes("float7")


def box(path: tuple[Any, ...] = ("m", "w"), shape=(4, 3), offsets=(0, 0), sizes=None, dtype="int16") -> Box:
    return Box(path=path, dtype=dtype, shape=shape, offsets=offsets, sizes=shape if sizes is None else sizes)


def part(*boxes: Box, rank: int = 0, save: str = "3f9ac2d1", **more: Any) -> Part:
    pieces, size = place(boxes)
    chunks = tuple(range(-(-size // CHUNK_BYTES)))
    return Part(rank=rank, save=save, bytes=size, pieces=pieces, chunks=chunks, **more)


def test_pieces_lie_at_multiples_of_64_and_the_file_ends_at_one() -> None:
    pieces, size = place([box(), box(shape=(0, 3)), box(shape=(32, 1)), box(shape=(33, 1)), box(shape=())])
    assert [piece.at for piece in pieces] == [0, 64, 64, 128, 256]
    assert size == 320
    assert place([]) == ((), 0)


def test_a_part_and_a_manifest_are_written_as_they_were() -> None:
    one = part(
        box(path=("m", ("k", (1, "a")))), values=((("lr",), 0.5),), own=((("rng", 0), {"~": "set", "v": []}),)
    )
    assert one.to_json() == (
        b'{"rank":0,"save":"3f9ac2d1","bytes":64,"chunk_bytes":8388608,"chunks":["0000000000000000"],'
        b'"values":[[["lr"],0.5]],"own":[[["rng",0],{"~":"set","v":[]}]],'
        b'"pieces":[[["m",["k",[1,"a"]]],"int16",[4,3],[0,0],[4,3],0]]}'
    )
    record = part_record(one, one.to_json())
    assert record == PartRecord(
        bytes=64, json_bytes=len(one.to_json()), xxh3=xxhash.xxh3_64_hexdigest(one.to_json())
    )
    name = "000001-step-000000007-3f9ac2d1"
    manifest = Manifest(name=name, step=7, save="3f9ac2d1", parts=(record,), saved_at=2.5, made_by="stoker")
    plain = {
        "version": 1,
        "name": name,
        "step": 7,
        "save": "3f9ac2d1",
        "saved_at": 2.5,
        "made_by": "stoker",
        "parts": [[64, record.json_bytes, record.xxh3]],
    }
    body = json.dumps(plain, separators=(",", ":")).encode()
    assert json.loads(manifest.to_json()) == {"manifest": plain, "xxh3": xxhash.xxh3_64_hexdigest(body)}
    assert manifest.to_json().endswith(b"\n}\n")
    assert parse_manifest(manifest.to_json(), name=name) == manifest
    assert parse_part(one.to_json(), manifest=manifest, rank=0) == one
    assert manifest.bytes == 64
    assert list(file_names(manifest)) == [("part-00000.bin", 64), ("part-00000.json", record.json_bytes)]
    marks = Marks(reason="final", metric=0.0, pin="")
    assert marks.to_plain() == {"reason": "final", "metric": 0.0}
    assert parse_manifest(replace(manifest, marks=marks).to_json(), name=name).marks == marks
    with pytest.raises(BadCheckpointError, match="holds the manifest of"):
        parse_manifest(manifest.to_json(), name="another")
    for torn in (
        manifest.to_json()[:-9],
        b"[]",
        b"{}",
        manifest.to_json().replace(b'"step": 7', b'"step": 8'),
    ):
        with pytest.raises(BadCheckpointError, match=f"the manifest of {name} cannot be used"):
            parse_manifest(torn, name=name)
    with pytest.raises(BadCheckpointError, match="of version 2, this stoker reads 1"):
        parse_manifest(replace(manifest, version=2).to_json(), name=name)
    with pytest.raises(BadCheckpointError, match="is not the file its manifest names"):
        parse_part(one.to_json() + b" ", manifest=manifest, rank=0)
    other = part(box(path=("m", ("k", (1, "a")))), save="00000000")
    forged = replace(manifest, parts=(part_record(other, other.to_json()),))
    with pytest.raises(BadCheckpointError, match="belongs to another save"):
        parse_part(other.to_json(), manifest=forged, rank=0)


RECORD = PartRecord(bytes=64, json_bytes=9, xxh3="00")
GOOD = Manifest(name="000001-step-000000007-3f9ac2d1", step=7, save="3f9ac2d1", parts=(RECORD,), saved_at=1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"step": 8}, "of step 8"),
        ({"save": "00000000"}, "of step 7 of save '00000000'"),
        ({"name": "x"}, "of step"),
        ({"parts": ()}, "no parts"),
        ({"saved_at": "1"}, "no number"),
        ({"saved_at": True}, "no number"),
        ({"parts": (replace(RECORD, bytes=-1),)}, "is no part"),
        ({"parts": (replace(RECORD, bytes=0),)}, ""),
        ({"parts": (replace(RECORD, json_bytes=1.5),)}, "is no part"),
        ({"parts": (RECORD, replace(RECORD, xxh3=5))}, "is no part"),
        ({"marks": Marks(metric="low")}, "no number"),
        ({"marks": Marks(metric=None)}, ""),
        ({"marks": Marks(metric=1)}, ""),
        ({"made_by": 5}, "is none"),
        ({"marks": Marks(pin=5)}, "is none"),
        ({"marks": Marks(reason=None)}, "is none"),
    ],
)
def test_a_manifest_says_what_can_be(changes: dict[str, Any], said: str) -> None:
    one = replace(GOOD, **changes)
    if said:
        with pytest.raises(ValueError, match=said):
            check_manifest(one)
    else:
        check_manifest(one)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"bytes": 128}, "of 128 bytes"),
        ({"chunk_bytes": 0}, "chunks of 0"),
        ({"chunk_bytes": 1.5}, "chunks of 1.5"),
        ({"chunk_bytes": 32}, "has 1 chunks of 64"),
        ({"chunk_bytes": 32, "chunks": (1, 2)}, ""),
        ({"chunks": ()}, "has 0 chunks"),
        ({"pieces": (Piece(box=box(path=()), at=0),)}, "no name"),
        ({"pieces": (Piece(box=box(path=(3,)), at=0),)}, "no name"),
        ({"pieces": (Piece(box=box(), at=40),)}, ""),
        ({"pieces": (Piece(box=box(), at=41),)}, "does not lie in its file"),
        ({"pieces": (Piece(box=box(), at=-1),)}, "sizes that are none"),
        ({"pieces": (Piece(box=box(sizes=(4, -3)), at=0),)}, "sizes that are none"),
        ({"pieces": (Piece(box=box(offsets=(0, True)), at=0),)}, "sizes that are none"),
        ({"pieces": (Piece(box=box(offsets=(0,)), at=0),)}, "does not lie"),
        ({"pieces": (Piece(box=box(sizes=(4,)), at=0),)}, "does not lie"),
    ],
)
def test_a_part_describes_what_lies_in_its_file(changes: dict[str, Any], said: str) -> None:
    one = replace(part(box()), **changes)
    if said:
        with pytest.raises(ValueError, match=said):
            check_part(one, RECORD)
    else:
        check_part(one, RECORD)


# --- values ---------------------------------------------------------------------------------------

_VALUES = [
    (None, None),
    (True, True),
    (3, 3),
    (0.5, 0.5),
    ("a", "a"),
    ([1, "a", None], [1, "a", None]),
    ({"a": [1]}, {"a": [1]}),
    ((1, 2), {"~": "tuple", "v": [1, 2]}),
    ({5}, {"~": "set", "v": [5]}),
    (frozenset([5]), {"~": "frozenset", "v": [5]}),
    (b"ab", {"~": "bytes", "v": "YWI="}),
    (bytearray(b"ab"), {"~": "bytearray", "v": "YWI="}),
    ({1: "a"}, {"~": "dict", "v": [[1, "a"]]}),
    ({"~": 1}, {"~": "dict", "v": [["~", 1]]}),
    (Counter("aa"), {"~": "counter", "v": [["a", 2]]}),
    (OrderedDict(a=1), {"~": "ordered", "v": [["a", 1]]}),
    (defaultdict(int, a=1), {"~": "defaultdict", "of": "int", "v": [["a", 1]]}),
    (
        defaultdict(None, {(1, 2): 3}),
        {"~": "defaultdict", "of": "None", "v": [[{"~": "tuple", "v": [1, 2]}, 3]]},
    ),
    (np.array([1, 2], "<i2"), {"~": "array", "dtype": "<i2", "shape": [2], "v": "AQACAA=="}),
    (np.float32(0.5), {"~": "array", "dtype": "<f4", "shape": [], "v": "AAAAPw=="}),
    (torch.bfloat16, {"~": "dtype", "v": "bfloat16"}),
    (torch.device("cuda:1"), {"~": "device", "v": "cuda:1"}),
]


@pytest.mark.parametrize(("value", "plain"), _VALUES, ids=lambda one: str(type(one).__name__))
def test_a_value_is_written_as_it_was_and_comes_back(value: Any, plain: Any) -> None:
    assert encode(value, name="x") == plain
    back = decode(json.loads(json.dumps(plain)))
    assert type(back) is type(value)
    assert np.array_equal(back, value) if isinstance(value, np.ndarray) else back == value
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory


def test_what_cannot_be_held_is_named_where_it_stands() -> None:
    for value, said in (
        ({"a": [1, object()]}, r"x\.a\[1\] is a builtins\.object"),
        (np.ma.masked_array([1], [True]), "x is a masked array"),
        (np.array([object()]), "x is an array of Python objects"),
        (np.zeros(2, [("a", "i4")]), "x is an array of records"),
        (defaultdict(lambda: 5), "x is a defaultdict whose default"),
        ({1: (object(),)}, r"x\.1\[0\] is a"),
    ):
        with pytest.raises(UsageError, match=said):
            encode(value, name="x")
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(UsageError, match=r"a\.b holds itself"):
        encoded({("a", "b"): loop})
    assert encoded({("a", 1): (2,)}) == ((("a", 1), {"~": "tuple", "v": [2]}),)


@pytest.mark.parametrize(
    "plain",
    [
        {"~": "nothing"},
        {"~": "tuple"},
        {"~": "array", "dtype": "O", "shape": [1], "v": ""},
        {"~": "dtype", "v": "Tensor"},
        {"~": "array", "dtype": "<i2", "shape": [3], "v": "AQACAA=="},
        {"~": "dict", "v": [[{}, 1]]},
        {"~": "dtype", "v": "nn"},
    ],
)
def test_what_is_none_of_ours_is_refused(plain: Any) -> None:
    with pytest.raises(BadCheckpointError, match="a value cannot be read"):
        decode(plain)


# --- coverage -------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@settings(max_examples=100)
@given(shape=SHAPES, data=st.data())
def test_boxes_cover_a_tensor_once_as_counting_its_elements_says(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    boxes = []
    for _ in range(data.draw(st.integers(1, 4))):
        offsets = tuple(data.draw(st.integers(0, max(0, size - 1))) for size in shape)
        sizes = tuple(
            data.draw(st.integers(0, size - at + data.draw(st.sampled_from([0] * 9 + [1]))))
            for size, at in zip(shape, offsets, strict=True)
        )
        boxes.append(box(shape=shape, offsets=offsets, sizes=sizes))
    count: Counter[tuple[int, ...]] = Counter()
    for one in boxes:
        count.update(
            product(*(range(at, at + size) for at, size in zip(one.offsets, one.sizes, strict=True)))
        )
    outside = any(
        at + size > whole
        for one in boxes
        for at, size, whole in zip(one.offsets, one.sizes, shape, strict=True)
    )
    fault = cover_fault(boxes)
    if outside:
        assert fault == "a piece of m.w lies outside of it"
    elif max(count.values(), default=0) > 1:
        assert fault == "two pieces of m.w overlap"
    elif sum(count.values()) < math.prod(shape):
        assert fault == f"no rank saved all of m.w: {sum(count.values()):,} of {math.prod(shape):,} elements"
    else:
        assert fault == ""


def test_boxes_of_other_shapes_or_dtypes_are_of_other_tensors() -> None:
    assert cover_fault([box(), box(dtype="int8")]) == "m.w is both int16 [4, 3] and int8 [4, 3]"
    assert cover_fault([box(sizes=(2, 3)), box(shape=(2, 3))]) == "m.w is both int16 [4, 3] and int16 [2, 3]"


def test_parts_of_other_saves_or_ranks_and_gaps_are_refused() -> None:
    one, other = box(sizes=(2, 3)), box(offsets=(2, 0), sizes=(2, 3))
    check_parts([part(one), part(other, rank=1)], save="3f9ac2d1")
    with pytest.raises(BadCheckpointError, match=r"parts of ranks \[2, 2\] belong"):
        check_parts([part(one), part(other, rank=2), part(rank=2, save="x")], save="3f9ac2d1")
    gap = box(path=("m", "v"), sizes=(1, 3))
    with pytest.raises(
        BadCheckpointError, match=r"no rank saved all of m\.v: 3 of 12 elements \(2 such tensors\)"
    ):
        check_parts([part(gap), part(other, rank=1)], save="3f9ac2d1")


def test_a_name_is_a_tensors_on_all_ranks_or_on_none() -> None:
    tensor = part(box(path=("m", "w")))
    for values, clash in (
        (("m", "w"), True),
        (("m", "w", "x"), True),
        (("m", "v"), False),
        (("m",), False),
        (("w",), False),
    ):
        other = replace(part(rank=1), values=((values, 1),))
        check_names([replace(tensor, values=((values, 1),))])
        if clash:
            with pytest.raises(CheckpointError, match=r"m\.w is a tensor on one rank"):
                check_names([tensor, other])
        else:
            check_names([tensor, other])
    with pytest.raises(CheckpointError):
        check_names([part(box(path=("m@0", "w"))), replace(part(rank=1), values=((("m", "w"), 1),))])


# --- what stays -----------------------------------------------------------------------------------

NAMES = [f"{at:06d}-step-{at:09d}-0000000{at}" for at in range(9, 0, -1)]
SOME = st.sets(st.sampled_from(NAMES))


@given(count=st.integers(0, 9), keep=st.integers(-1, 10), good=SOME, proven=SOME, spare=SOME)
def test_what_may_go_is_what_is_older_than_enough_good_ones(count, keep, good, proven, spare) -> None:
    names, asked = NAMES[:count], []
    gone = expired(
        names,
        keep=keep,
        good=lambda one: asked.append(one) or one in good,
        proven=proven.__contains__,
        spare=spare,
    )
    places = [at for at, name in enumerate(names) if name in good][: max(keep, 0)]
    enough = 0 < keep == len(places)
    stands = any(names[at] in proven for at in places)
    older = names[places[-1] + 1 :] if enough else []
    assert gone == ([name for name in older if name not in spare] if stands and count > keep else [])
    assert len(asked) == len(set(asked))


@given(
    sizes=st.lists(st.integers(0, 9), max_size=9),
    budget=st.integers(0, 50),
    need=st.integers(0, 9),
    proven=SOME,
    spare=SOME,
)
def test_the_oldest_go_until_what_is_left_fits(sizes, budget, need, proven, spare) -> None:
    held = list(zip(NAMES, sizes, strict=False))
    newest = next((at for at, (name, _) in enumerate(held) if name in proven), None)
    total, gone = sum(sizes) + need, []
    for at in range(len(held) - 1, -1, -1):
        name, size = held[at]
        if budget and newest is not None and at > newest and total > budget and name not in spare:
            gone.append(name)
            total -= size
    assert over_budget(held, budget=budget, need=need, proven=proven.__contains__, spare=spare) == gone


def test_a_job_deletes_its_own_and_what_was_there_before_its_first() -> None:
    ours = Ours()
    assert ours.has(NAMES[0])
    assert not ours.made(NAMES[0])
    ours.add(NAMES[4])
    ours.add(NAMES[2])
    assert [ours.has(name) for name in NAMES] == [False, False, True, False, True, True, True, True, True]
    assert [name for name in NAMES if ours.made(name)] == [NAMES[2], NAMES[4]]
    assert ours.has("no checkpoint")


def test_why_one_stays_is_said_in_words() -> None:
    def one(at: int, metric: float | None = None, pin: str = "", saved_at: float = 0.0) -> Manifest:
        return Manifest(
            name=f"c{at}",
            step=at,
            save="",
            parts=(),
            saved_at=saved_at or at * 100.0,
            marks=Marks(metric=metric, pin=pin),
        )

    rows = [one(5), one(1, 0.25), one(2, 0.5), one(3, math.inf), one(4, 0.25, pin="gold")]
    assert spared(rows, KeepRules(best=1)) == {"c4": "pinned as gold"}
    assert spared(rows, KeepRules(best=2)) == {"c4": "pinned as gold", "c1": "metric 0.25"}
    assert spared(rows, KeepRules(best=1, best_is="max"), pins=["c4", "c5", "gone"]) == {
        "c2": "metric 0.5",
        "c4": "pinned as gold",
        "c5": "pinned",
    }
    assert spared(rows, KeepRules(every_s=200)) == {
        "c1": "one in every 200 s",
        "c3": "one in every 200 s",
        "c4": "pinned as gold",
        "c5": "one in every 200 s",
    }
    assert spared([one(2, saved_at=9.0), one(1, saved_at=9.0)], KeepRules(every_s=1)) == {
        "c1": "one in every 1 s"
    }
    assert KeepRules() == KeepRules(best=0, best_is="min", every_s=0.0)


# --- marks, claims --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "word"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, 2], "0,2"),
        ([0, 2, 4], "0-4:2"),
        ([0, 1, 2, 4, 6, 8], "0-2,4-8:2"),
        ([1, 2, 9], "1-2,9"),
        ([3, 7, 8], "3,7-8"),
    ],
)
def test_ranks_are_named_in_the_fewest_words(ranks: list[int], word: str) -> None:
    assert marked(("m", "w"), ranks) == (f"m@{word}", "w")
    assert unmarked((f"m@{word}", "w")) == (("m", "w"), tuple(ranks))


@pytest.mark.parametrize("name", ["m", "m@", "m@x", "m@1-", "m@1,", "@"])
def test_what_is_no_mark_is_a_name(name: str) -> None:
    assert unmarked((name, "w")) == ((name, "w"), ())


def test_all_can_watch_what_all_claim_each_for_itself() -> None:
    a, b = Claim(box=box(path=("m", "a"))), Claim(box=box(path=("m", "b")))
    assert is_shared_by_all([[a, b], [a, b]])
    assert is_shared_by_all([[a, b], [a]])
    assert not is_shared_by_all([[a, b], [a, b], [a]])
    assert not is_shared_by_all([[a], [b]])
    assert not is_shared_by_all([[replace(a, mesh=(0, 1))], [replace(a, mesh=(0, 1))]])
    assert told_apart([[a, b], [a]], deal([[a, b], [a]])) == [([0], []), ([0], [])]


# --- digests and spot checks ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex64])
@pytest.mark.parametrize("count", [0, 1, 7, 1000])
def test_a_cards_digest_is_a_sum_of_mixed_words_with_their_places(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(count).to(dtype)
    words = (
        tensor.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]).tolist()
        if count
        else []
    )
    total = 0

    def signed(number: int) -> int:
        return (number + (1 << 63)) % (1 << 64) - (1 << 63)

    for at, word in enumerate(words, 1):
        mixed = signed(word + at * (0x9E3779B97F4A7C15 - (1 << 64)))
        mixed = signed((mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D)
        total = signed(total + (mixed ^ (mixed >> 32)))
    assert int(card_digest(tensor)) == total


def test_a_card_takes_long_tensors_a_piece_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.arange(1000, dtype=torch.int32)
    whole = int(card_digest(tensor))
    monkeypatch.setattr("stoker.checkpoint.snapshot.digest._AT_ONCE", 7)
    assert int(card_digest(tensor)) == whole


def test_in_memory_a_digest_is_that_of_the_bytes_in_order() -> None:
    some = [torch.arange(6.0).reshape(2, 3).T, torch.zeros(0), torch.tensor(3, dtype=torch.int8)]
    assert digests(some) == [
        xxhash.xxh3_64_intdigest(some[0].contiguous().numpy().tobytes()),
        0,
        xxhash.xxh3_64_intdigest(b"\3"),
    ]


@given(count=st.integers(0, 400), turn=st.integers(0, 20))
def test_a_comb_has_64_teeth_at_most_and_comes_by_everywhere(count: int, turn: int) -> None:
    some, step = comb(count, turn), -(-count // 64)
    assert len(some) <= 64
    if count <= 64:
        assert some == list(range(count))
    else:
        assert set(np.diff(some).tolist()) == {step}
        assert sorted(at for one in range(turn, turn + step) for at in comb(count, one)) == list(range(count))


@settings(max_examples=25)
@given(shape=st.lists(st.integers(1, 300), min_size=1, max_size=3).map(tuple), turn=st.integers(0, 99))
def test_a_spot_is_a_view_of_at_most_32_kib_wherever_in_the_tensor(shape: tuple[int, ...], turn: int) -> None:
    tensor = torch.zeros(shape)
    (spot,) = spots([tensor], turn=turn)
    assert 0 < spot.nbytes <= 32 << 10
    assert spot.nbytes * 2 > min(32 << 10, tensor.nbytes) or shape[0] < 300
    assert spot.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    (again,) = spots([torch.ones(shape)], turn=turn)
    assert (again.shape, again.storage_offset()) == (spot.shape, spot.storage_offset())


def test_spots_of_a_large_tensor_are_its_largest_small_pieces() -> None:
    (rows,) = spots([torch.zeros(100, 1024)], turn=0)
    assert rows.shape == (8, 1024)
    (corner,) = spots([torch.zeros(3, 20_000)], turn=0)
    assert corner.shape == (1, 8192)
    tall = torch.zeros(100, 1024)
    places = {spots([tall], turn=turn)[0].storage_offset() // 1024 for turn in range(900)}
    assert places == set(range(93))
    assert [spots([torch.zeros(one)], turn=0)[0].shape for one in ((8192,), (0, 5))] == [(8192,), (0, 5)]


def test_a_witness_names_the_first_that_changed_meanwhile() -> None:
    some = [torch.full((4,), math.nan), torch.zeros(3), torch.zeros(3), torch.zeros(0)]
    for change, first in ((None, None), (1, 1), (2, 2), (0, 0)):
        witness = Witness(some, turn=3)
        if change is not None:
            some[change][1] = 7.0 + some[change][1].nan_to_num()
        witness.look()
        assert witness.changed() == first


# --- moves, memory, names -------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(1, 300), max_size=5), cut=st.integers(1, 400))
def test_moves_go_through_every_write_and_across_no_cut(sizes: list[int], cut: int) -> None:
    pieces, _ = place(
        [
            box(path=("m", str(at)), shape=(size,), offsets=(0,), dtype="uint8")
            for at, size in enumerate(sizes)
        ]
    )
    moves = list(_moves([Write(piece=piece, path=piece.box.path) for piece in pieces], cut))
    for number, piece in enumerate(pieces):
        mine = [move for move in moves if move.write == number]
        assert sum(move.bytes for move in mine) == sizes[number]
        at = 0
        for move in mine:
            assert (move.skip, move.at) == (at, piece.at + at)
            assert move.at // cut == (move.at + move.bytes - 1) // cut
            assert (move.at + move.bytes) % cut == 0 or at + move.bytes == sizes[number]
            at += move.bytes


@given(
    st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=5),
    st.booleans(),
)
def test_tensors_that_share_memory_are_read_beside_it(views: list[tuple[int, int, int]], same: bool) -> None:
    memory = torch.zeros(60)
    targets = {f"t{n}": memory[at : at + size * step : step] for n, (at, size, step) in enumerate(views)}
    cells = {
        name: set(range(at, at + (size - 1) * step + 1))
        for name, (at, size, step) in zip(targets, views, strict=True)
    }
    sharing = shared(targets, same=lambda one, other: same)
    crowds: list[set[str]] = []
    for name in targets:
        mine = {name}
        for crowd in [crowd for crowd in crowds if any(cells[name] & cells[one] for one in crowd)]:
            crowds.remove(crowd)
            mine |= crowd
        crowds.append(mine)
    places = {
        name: (at, size, step) if size > 1 else (at, 1, step)
        for name, (at, size, step) in zip(targets, views, strict=True)
    }
    left = set(targets)
    if same:  # of those at one place only the first is read
        for crowd in crowds:
            for name in sorted(crowd):
                if any(places[one] == places[name] for one in crowd & left if one < name):
                    left.discard(name)
    assert set(sharing.targets) == left
    expected = {name for crowd in crowds if len(crowd & left) > 1 for name in crowd & left}
    assert set(sharing.beside) == expected
    for name in left:
        is_own = sharing.targets[name].untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()
        assert is_own == (name in expected)


def test_values_by_path_are_nested_again() -> None:
    rows = [
        (("a", 0, "x"), 1),
        (("a", 2), 5),
        (("b", ("k", 7)), 2),
        (("a", 0, "y"), 3),
        (("b",), {}),
        (("c",), []),
        (("d", "e"), 1),
    ]
    assert nest(iter(rows)) == {"a": [{"x": 1, "y": 3}, None, 5], "b": {7: 2}, "c": [], "d": {"e": 1}}
    assert nest(iter([(("b",), {}), (("b", "c"), 1)])) == {"b": {"c": 1}}


def test_an_optimizers_state_has_names_and_its_numbers_back() -> None:
    model, head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(
        [{"params": [model.bias, model.weight]}, {"params": [head.weight, head.bias]}], lr=0.1
    )
    alone, both = {"model": model}, {"model": model, "head": head}
    assert list(parameter_names(alone).values()) == ["weight", "bias"]
    assert sorted(parameter_names(both).values()) == [
        "head.bias",
        "head.weight",
        "model.bias",
        "model.weight",
    ]
    paths = parameter_paths(both)
    assert paths[id(head.bias)] == ("head", "bias")
    long = names_as_saved(optimizer, paths, ["model.bias", "model.weight", "head.weight", "head.bias"])
    assert long[id(head.bias)] == "head.bias"
    assert names_as_saved(optimizer, paths, [0, 1, 2, 3]) == {}
    assert names_as_saved(optimizer, paths, ["other"]) == long
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    assert names_as_saved(one, parameter_paths(alone), ["weight", "bias"]) == {
        id(model.weight): "weight",
        id(model.bias): "bias",
    }
    assert (
        names_as_saved(one, parameter_paths(alone), ["model.weight", "model.bias"])[id(model.bias)]
        == "model.bias"
    )
    assert names_as_saved(one, parameter_paths(alone), ["other"])[id(model.bias)] == "bias"
    state = {
        "state": {"head.bias": {"x": 1}, "model.weight": {"x": 2}},
        "param_groups": [
            {"lr": 1, "params": ["model.weight", "model.bias"]},
            {"lr": 2, "params": ["head.bias", "head.weight"]},
        ],
    }
    assert numbered_state(optimizer, state, long) == {
        "state": {3: {"x": 1}, 1: {"x": 2}},
        "param_groups": [{"lr": 1, "params": [0, 1]}, {"lr": 2, "params": [2, 3]}],
    }
    moved = {"state": {}, "param_groups": [{"params": ["head.bias"]}, {"params": ["model.bias"]}]}
    with pytest.raises(UsageError, match="group 0 of the optimizer has other parameters"):
        numbered_state(optimizer, moved, long)
    some = {"state": {}, "param_groups": [{"params": ["model.bias"]}, {"params": []}]}
    assert [one["params"] for one in numbered_state(optimizer, some, long)["param_groups"]] == [
        [0, 1],
        [2, 3],
    ]


def test_random_generators_go_on_where_they_were() -> None:
    def draws() -> list[float]:
        return [
            random.random(),
            float(np.random.rand()),
            float(torch.rand(())),
            random.gauss(0, 1),
            float(np.random.randn()),
        ]

    draws()
    state = {
        path: decode(json.loads(json.dumps(encode(one, name="x")))) for path, one in random_state().items()
    }
    first = draws()
    draws()
    set_random_state(state)
    assert draws() == first
    assert set(state) >= {("python",), ("numpy",), ("torch",)}
    set_random_state({})
