"""Slices of a dataset's files are checked one by one, against digests that the manifest vouches for."""

from __future__ import annotations

import errno
import mmap
import os
import random
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
import xxhash

import stoker
from stoker.errors import BadShardError, StorageError
from stoker.formats.checksums import hash_file
from stoker.manifest import FileRecord, Manifest, ShardRecord, write_manifest
from stoker.stage.disk.grounds import Grounds
from stoker.stage.landing import digest
from stoker.stage.landing.digest import BlockDigests
from stoker.stage.landing.maps import SLICE_BYTES
from stoker.stage.landing.part import Part
from stoker.stage.landing.slices import landing
from stoker.stage.origins.origin import RemoteFile
from stoker.stage.plan import Unit
from stoker.stage.run import stage
from stoker.storage import LocalStore

SIZE = 9 * SLICE_BYTES + 54321
DATA = random.Random(7).randbytes(SIZE)
WRONG = bytes(SLICE_BYTES)


def slices(data):
    return [data[at : at + SLICE_BYTES] for at in range(0, len(data), SLICE_BYTES)]


def blocks_of(block_bytes):
    blocks = (DATA[at : at + block_bytes] for at in range(0, SIZE, block_bytes))
    digests = b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(block)) for block in blocks)
    return BlockDigests(data=digests, block_bytes=block_bytes)


BLOCKS = blocks_of(SLICE_BYTES // 8)
FILE = RemoteFile(name="a.bin", url="s3://b/a.bin", bytes=SIZE, digest="xxh3:0")  # that nobody computes
UNIT = Unit(key="a", folder="s3/b", files=(FILE,), blocks=(BLOCKS,))


@pytest.fixture
def part(tmp_path):
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    yield part
    part.close()


def land(part, pieces):
    """Pieces, by the byte they begin at."""
    with landing(part, 0) as sink:
        for offset, data in pieces.items():
            sink.write(offset, memoryview(data))


def whole(data=DATA):
    return {number * SLICE_BYTES: each for number, each in enumerate(slices(data))}


def test_slices_in_any_order_make_a_file(part, tmp_path):
    land(part, dict(random.Random(1).sample(list(whole().items()), k=len(whole()))))
    part.publish(b"")
    assert (tmp_path / "s3/b/a.bin").read_bytes() == DATA


def test_past_the_page_cache_the_same_file_lands_from_any_memory(part, tmp_path):
    with landing(part, 0, past_cache=True) as sink:
        for number, (offset, data) in enumerate(whole().items()):
            pages = mmap.mmap(-1, len(data))
            pages[:] = data
            askew = bytearray(1) + data
            sink.write(offset, memoryview(pages) if number % 2 else memoryview(askew)[1:])
    part.publish(b"")
    assert (tmp_path / "s3/b/a.bin").read_bytes() == DATA


def test_a_wrong_slice_stays_missing_and_the_others_stay(part):
    with pytest.raises(BadShardError, match=r"a\.bin arrived as other bytes .* from 3,145,728 to 4,194,304"):
        land(part, {**whole(), 3 * SLICE_BYTES: WRONG})
    assert part.missing(0) == [(3 * SLICE_BYTES, 4 * SLICE_BYTES)]
    land(part, {3 * SLICE_BYTES: DATA[3 * SLICE_BYTES : 4 * SLICE_BYTES]})
    assert part.missing(0) == []


def test_pieces_that_make_a_wrong_slice_are_fetched_again(part):
    middle = SLICE_BYTES + SLICE_BYTES // 2
    pieces = {**whole(), SLICE_BYTES: DATA[SLICE_BYTES:middle], middle: WRONG[middle - SLICE_BYTES :]}
    with pytest.raises(BadShardError):
        land(part, pieces)
    assert part.missing(0) == [(SLICE_BYTES, 2 * SLICE_BYTES)]
    land(part, {SLICE_BYTES: DATA[SLICE_BYTES : 2 * SLICE_BYTES]})
    assert part.missing(0) == []


def test_what_an_earlier_owner_left_must_be_right_too(tmp_path):
    unchecked = Part(tmp_path / "p", replace(UNIT, blocks=()), grounds=Grounds.of(tmp_path))
    with suppress(BadShardError):
        land(unchecked, {**whole(), 2 * SLICE_BYTES: WRONG})
    unchecked.close()
    part = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))  # to be what its map says is not enough
    assert part.missing(0) == [(2 * SLICE_BYTES, 3 * SLICE_BYTES)]
    part.close()


@pytest.mark.parametrize("good", [True, False], ids=["as it should be", "as it should not be"])
def test_a_file_that_got_its_name_just_before_its_owner_died(good, tmp_path):
    part = Part(tmp_path / "p", replace(UNIT, blocks=()), grounds=Grounds.of(tmp_path))
    with suppress(BadShardError):
        land(part, whole() if good else {**whole(), 0: WRONG})
    part.publish(b"")
    part.close()
    heir = Part(tmp_path / "p", UNIT, grounds=Grounds.of(tmp_path))
    with suppress(BadShardError):
        land(heir, {})
    assert heir.missing(0) == ([] if good else [(0, SIZE)])
    if not good:
        land(heir, whole())
    heir.publish(b"")
    heir.close()
    assert (tmp_path / "s3/b/a.bin").read_bytes() == DATA


def test_digests_of_another_number_of_blocks_are_not_used(tmp_path):
    known = f"xxh3:{xxhash.xxh3_64_hexdigest(DATA)}"
    fewer = replace(BLOCKS, data=BLOCKS.data[8:])
    unit = replace(UNIT, files=(replace(FILE, digest=known),), blocks=(fewer,))
    part = Part(tmp_path / "p", unit, grounds=Grounds.of(tmp_path))
    land(part, whole())
    part.close()


# --- a dataset ------------------------------------------------------------------------------------


def write_set(folder, *, block_bytes):
    """Two shards, a large one and a small one before it."""
    folder.mkdir()
    shards, blocks = [], []
    for name, data in (("0", DATA[:1000]), ("1", DATA)):
        (folder / f"{name}.bin").write_bytes(data)
        with (folder / f"{name}.bin").open("rb") as file:
            hashed = hash_file(file, block_bytes=block_bytes)
        record = FileRecord(name=f"{name}.bin", bytes=len(data), xxh3=hashed.digest())
        shards.append(ShardRecord(name=name, samples=1, tokens=0, files=(record,)))
        blocks += hashed.blocks()
    manifest = Manifest(format="webdataset", shards=tuple(shards), block_bytes=block_bytes)
    write_manifest(LocalStore(folder), manifest, blocks=np.array(blocks, "<u8"))
    return folder


@pytest.mark.parametrize(
    ("block_bytes", "blocks"),
    [
        (SLICE_BYTES // 8, BLOCKS),
        (SLICE_BYTES, blocks_of(SLICE_BYTES)),
        (SLICE_BYTES // 8 + 8, None),
        (4 * SLICE_BYTES, None),
    ],
)
def test_a_dataset_is_checked_by_its_blocks_where_slices_are_made_of_these(block_bytes, blocks, tmp_path):
    folder = write_set(tmp_path / "set", block_bytes=block_bytes)
    with stoker.Cache(tmp_path / "cache") as cache:
        near = cache.at(folder)
        (large,) = (unit for unit in near.units if not unit.is_bundle)
        assert near.vouched(large).blocks == ((blocks,) if blocks else ())
        assert near.local_path("1.bin").read_bytes() == DATA


@pytest.mark.parametrize("block_bytes", [SLICE_BYTES, 4 * SLICE_BYTES])
def test_a_damaged_origin_is_refused_either_way(block_bytes, tmp_path):
    folder = write_set(tmp_path / "set", block_bytes=block_bytes)
    with (folder / "1.bin").open("r+b") as file:
        file.seek(5 * SLICE_BYTES)
        file.write(b"damaged")
    with stoker.Cache(tmp_path / "cache") as cache:
        near = cache.at(folder)
        with pytest.raises(BadShardError, match=r"1\.bin arrived as"):
            near.local_path("1.bin")
        assert not (near.folder / "1.bin").exists()


def test_digests_that_were_damaged_here_are_not_used(tmp_path):
    folder = write_set(tmp_path / "set", block_bytes=SLICE_BYTES)
    with stoker.Cache(tmp_path / "cache") as cache:
        near = cache.at(folder)
        path = near.local_path("blocks.xxh3")
        path.write_bytes(bytes(path.stat().st_size))
        assert near.local_path("1.bin").read_bytes() == DATA


def test_what_is_damaged_on_the_disk_is_not_preloaded_and_no_error(tmp_path, monkeypatch):
    monkeypatch.setattr("stoker.stage.preload.shm_folder", lambda: tmp_path / "shm")
    folder = write_set(tmp_path / "set", block_bytes=SLICE_BYTES)
    path = stoker.fetch(str(folder), cache=tmp_path / "cache") / "1.bin"
    with path.open("r+b") as file:
        file.write(b"damaged")
    with stoker.Cache(tmp_path / "cache", preload="shm") as cache:
        near = cache.at(folder)
        assert near.local_path("1.bin") == path
        near.refetch("1.bin", damaged=path.stat().st_ino)
    assert path.read_bytes() == DATA


def test_a_file_that_the_disk_cannot_read_any_more_is_damaged(tmp_path, monkeypatch):
    folder = write_set(tmp_path / "set", block_bytes=SLICE_BYTES)
    lost = stoker.fetch(str(folder), cache=tmp_path / "cache") / "1.bin"
    inode, read = lost.stat().st_ino, digest._digest_of_file

    def fail(path, kind):
        if path.stat().st_ino == inode:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(path, kind)

    monkeypatch.setattr(digest, "_digest_of_file", fail)
    with stoker.Cache(tmp_path / "cache") as cache:
        assert stage(str(folder), cache, doubt=cache.shelf.damaged).damaged == ("1.bin",)
    assert lost.stat().st_ino != inode
    assert lost.read_bytes() == DATA


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def fail(path, kind):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(digest, "_digest_of_file", fail)
    with pytest.raises(StorageError, match="x: Permission denied"):
        digest.is_sound(tmp_path / "x", "xxh3:0")
