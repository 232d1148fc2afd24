"""A unit on its way: what has landed counts, what is torn does not."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadShardError
from stoker.stage.disk.grounds import Grounds
from stoker.stage.landing.maps import SLICE_BYTES, is_part_of, reserved_bytes
from stoker.stage.landing.part import Part
from stoker.stage.landing.slices import landing
from stoker.stage.origins.origin import Collection, RemoteFile
from stoker.stage.plan import units_of

SIZE = 10 * SLICE_BYTES + 12345
DATA = random.Random(5).randbytes(SIZE)
FILE = RemoteFile(
    name="a.bin", url="s3://b/a.bin", bytes=SIZE, digest=f"xxh3:{xxhash.xxh3_64_hexdigest(DATA)}"
)


def unit_of(*files):
    (unit,) = units_of(Collection(url="s3://b", kind="folder", files=files), folder="s3/b")
    return unit


UNIT = unit_of(FILE)


def land(part, spans):
    """Write these stretches, slice by slice, and leave before the end."""
    with suppress(InterruptedError), landing(part, 0) as sink:
        for start, stop in spans:
            for at in range(start // SLICE_BYTES * SLICE_BYTES, stop, SLICE_BYTES):
                begin, end = max(at, start), min(at + SLICE_BYTES, stop)
                sink.write(begin, memoryview(DATA)[begin:end])
        raise InterruptedError
    part.close()


def finish(part):
    with landing(part, 0) as sink:
        for start, stop in part.missing(0):
            while start < stop:
                end = min(stop, (start // SLICE_BYTES + 1) * SLICE_BYTES)
                sink.write(start, memoryview(DATA)[start:end])
                start = end


def test_what_has_landed_is_not_fetched_again(tmp_path):
    land(
        Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path)),
        [(0, 3 * SLICE_BYTES), (5 * SLICE_BYTES, 6 * SLICE_BYTES)],
    )
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    assert part.missing(0) == [(3 * SLICE_BYTES, 5 * SLICE_BYTES), (6 * SLICE_BYTES, SIZE)]
    part.close()


def test_a_torn_slice_is_fetched_again(tmp_path):
    land(Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path)), [(0, SIZE)])
    with (tmp_path / "p" / "0").open("r+b") as file:
        file.seek(4 * SLICE_BYTES + 77)
        file.write(b"torn")
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    assert part.missing(0) == [(4 * SLICE_BYTES, 5 * SLICE_BYTES)]
    finish(part)
    part.publish(b"")
    assert (tmp_path / "s3/b/a.bin").read_bytes() == DATA
    part.close()


def test_the_first_bytes_of_a_slice_count_too(tmp_path):
    land(Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path)), [(SLICE_BYTES, SLICE_BYTES + 1000)])
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    assert part.missing(0) == [(0, SLICE_BYTES), (SLICE_BYTES + 1000, SIZE)]
    finish(part)
    part.close()


@settings(max_examples=25)
@given(st.randoms(use_true_random=False))
def test_pieces_may_come_in_any_order(tmp_path_factory, random):
    folder = tmp_path_factory.mktemp("any")
    cuts = sorted({0, SIZE, *(random.randrange(SIZE) for _ in range(30)), *range(0, SIZE, SLICE_BYTES)})
    pieces = list(pairwise(cuts))
    random.shuffle(pieces)
    part = Part(folder / "p", UNIT, grounds=Grounds.of(folder))
    with landing(part, 0) as sink:  # verifies the digest of the whole
        for start, stop in pieces:
            sink.write(start, memoryview(DATA)[start:stop])
    part.close()
    assert not Part(folder / "p", UNIT, grounds=Grounds.of(folder)).missing(0)


def test_a_map_that_is_garbage_costs_a_new_start(tmp_path):
    land(Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path)), [(0, SIZE)])
    (tmp_path / "p" / "map").write_bytes(b"\xff" * 500)
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    assert part.missing(0) == [(0, SIZE)]
    finish(part)
    part.close()


def test_what_belongs_to_another_version_is_not_used(tmp_path):
    land(Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path)), [(0, SIZE)])
    changed = unit_of(replace(FILE, digest="xxh3:0"))
    assert not is_part_of(tmp_path / "p", changed)
    part = Part(tmp_path / "p", changed, grounds=Grounds.of(tmp_path))
    assert part.missing(0) == [(0, SIZE)]
    part.close()


def test_wrong_bytes_are_refused(tmp_path):
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))

    def land_zeros():
        with landing(part, 0) as sink:
            for at in range(0, SIZE, SLICE_BYTES):
                sink.write(at, memoryview(bytes(min(SLICE_BYTES, SIZE - at))))

    with pytest.raises(BadShardError, match="arrived as"):
        land_zeros()
    part.close()


def test_late_writes_of_a_paused_owner_do_not_reach_its_successor(tmp_path):
    paused = Part(tmp_path / "paused", UNIT, grounds=Grounds.of(tmp_path))
    with suppress(InterruptedError), landing(paused, 0) as late:
        late.write(0, memoryview(DATA)[:SLICE_BYTES])
        heir = Part(tmp_path / "heir", UNIT, grounds=Grounds.of(tmp_path))
        heir.copy_from(tmp_path / "paused")
        assert heir.missing(0) == [(SLICE_BYTES, SIZE)]
        for path in (tmp_path / "paused").iterdir():
            path.unlink()
        late.write(0, memoryview(bytes(SLICE_BYTES)))  # it wakes up, and writes nonsense
        finish(heir)
        heir.publish(b"")
        raise InterruptedError
    assert (tmp_path / "s3/b/a.bin").read_bytes() == DATA
    with pytest.raises(FileNotFoundError):
        paused.publish(b"")
    paused.close()
    heir.close()


def test_an_owner_killed_while_publishing_has_published(tmp_path):
    small = [RemoteFile(name=f"{n}", url=f"u/{n}", bytes=100) for n in range(3)]
    unit = unit_of(*small)
    part = Part(tmp_path / "p", unit, grounds=Grounds.of(tmp_path))
    for number in range(3):
        part.put([(number, memoryview(bytearray([number]) * 100))])
    home = tmp_path / "s3/b/0"
    home.parent.mkdir(parents=True)
    (tmp_path / "p" / "0").rename(home)
    part.close()
    successor = Part(tmp_path / "p", unit, grounds=Grounds.of(tmp_path))
    assert [successor.missing(number) for number in range(3)] == [[], [], []]
    successor.publish(b"")
    successor.close()
    assert [(tmp_path / f"s3/b/{n}").read_bytes() for n in range(3)] == [bytes([n]) * 100 for n in range(3)]


def test_an_old_file_under_the_final_name_is_not_taken_for_the_new_one(tmp_path):
    home = tmp_path / "s3/b/a.bin"
    home.parent.mkdir(parents=True)
    home.write_bytes(bytes(SIZE))
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    assert part.missing(0) == [(0, SIZE)]
    finish(part)
    part.publish(b"")
    part.close()
    assert home.read_bytes() == DATA


def test_a_part_says_what_it_will_take(tmp_path):
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    assert reserved_bytes(tmp_path / "p")[0] == SIZE
    land(part, [(0, 8 * SLICE_BYTES)])
    whole, rest = reserved_bytes(tmp_path / "p")
    assert whole == SIZE
    assert rest <= SIZE - 8 * SLICE_BYTES
    assert reserved_bytes(tmp_path / "nothing") == (0, 0)
