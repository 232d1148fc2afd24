"""What lies where of a checkpoint of several ranks: no part that is nowhere, or damaged, is passed over."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.saved.layout import (
    MANIFEST,
    Box,
    Manifest,
    Part,
    checkpoint_name,
    part_name,
    part_record,
    place,
)
from stoker.checkpoint.saved.survey import clear, sort_out, survey, verify_copies
from stoker.checkpoint.saved.tiers import Tiers
from stoker.storage import open_store

if TYPE_CHECKING:
    from collections.abc import Iterator

RANKS = 3
SOME = st.frozensets(st.integers(0, RANKS - 1))
ALL = frozenset(range(RANKS))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return (tmp_path_factory.mktemp("survey") / str(number) for number in count())


def put(root: Path, sequence: int, *, here: frozenset[int] = ALL, bad: frozenset[int] = frozenset()) -> str:
    """A checkpoint of three ranks of which these parts lie here, some of them damaged."""
    name = checkpoint_name(sequence=sequence, step=sequence, save="3f9ac2d1")
    (root / name).mkdir(parents=True)
    records = []
    for rank in range(RANKS):
        box = Box(path=("m", str(rank)), dtype="uint8", shape=(128,), offsets=(0,), sizes=(128,))
        pieces, size = place([box])
        data = bytes([rank + 1] * size)
        digest = xxhash.xxh3_64_intdigest(data)
        part = Part(rank=rank, save="3f9ac2d1", bytes=size, pieces=pieces, chunks=(digest,))
        records.append(part_record(part, part.to_json()))
        (root / name / part_name(rank, "json")).write_bytes(part.to_json())
        if rank in here:
            (root / name / part_name(rank, "bin")).write_bytes(bytes(size) if rank in bad else data)
    manifest = Manifest(name=name, step=sequence, save="3f9ac2d1", parts=tuple(records), saved_at=1.0)
    (root / name / MANIFEST).write_bytes(manifest.to_json())
    return name


@given(near=SOME, far=st.none() | SOME, bad_near=SOME, bad_far=SOME)
def test_a_copy_is_what_should_lie_there_and_every_byte_of_it(
    folders: Iterator[Path], near: frozenset[int], far: frozenset[int] | None, bad_near, bad_far
) -> None:
    """Beside a remote tier a node may have its own parts only; without one all must be here."""
    root, beyond = next(folders), next(folders)
    name = put(root, 1, here=near, bad=bad_near)
    expected = {"local": bool(near & bad_near) if far is not None else near != ALL or bool(bad_near)}
    remote = None
    if far is not None:
        put(beyond, 1, here=far, bad=bad_far)
        remote = open_store(str(beyond))
        expected["remote"] = far != ALL or bool(bad_far)
    found = verify_copies(Tiers(root=root, remote=remote), name)
    assert {tier: bool(faults) for tier, faults in found.items()} == expected


@given(near=SOME, far=st.none() | SOME, bad_near=SOME, bad_far=SOME, keep=st.integers(0, 2))
def test_an_older_one_goes_only_if_every_part_of_the_newer_is_good_in_one_of_the_tiers(
    folders: Iterator[Path], near: frozenset[int], far: frozenset[int] | None, bad_near, bad_far, keep: int
) -> None:
    root, beyond = next(folders), next(folders)
    older, newer = put(root, 1), put(root, 2, here=near, bad=bad_near)
    remote = None
    if far is not None:
        put(beyond, 2, here=far, bad=bad_far)
        remote = open_store(str(beyond))
    there = near | (far or frozenset())
    good = there == ALL and not near & bad_near and not (there - near) & bad_far
    tiers = Tiers(root=root, remote=remote)
    found = sort_out(tiers, keep=keep)
    assert [one.name for one in found["superseded"]] == ([older] if good and keep == 1 else [])
    assert found["garbage"] == []
    clear(tiers, found)
    left = [one.name for one in survey(tiers)]
    assert left == ([newer] if found["superseded"] else [newer, older])
