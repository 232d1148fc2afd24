"""Digests of a stream equal the one-shot xxh3 of the same bytes, whole and per block."""

from __future__ import annotations

import io

import xxhash
from hypothesis import given
from hypothesis import strategies as st

from stoker.formats.checksums import HashingFile, block_count, hash_file

writes = st.lists(st.binary(max_size=40), max_size=12)
sizes = st.integers(1, 32)


def hashed(parts: list[bytes], block_bytes: int) -> tuple[HashingFile, bytes]:
    target = io.BytesIO()
    hashing = HashingFile(target, block_bytes=block_bytes)
    for part in parts:
        hashing.write(part)
    return hashing, target.getvalue()


@given(writes, sizes)
def test_the_digest_is_the_one_shot_xxh3(parts: list[bytes], block_bytes: int) -> None:
    hashing, written = hashed(parts, block_bytes)
    assert hashing.digest() == xxhash.xxh3_64_hexdigest(written)


@given(writes, sizes)
def test_block_digests_are_the_one_shot_xxh3_of_each_block(parts: list[bytes], block_bytes: int) -> None:
    hashing, written = hashed(parts, block_bytes)
    blocks = [written[at : at + block_bytes] for at in range(0, len(written), block_bytes)]
    assert hashing.blocks() == tuple(map(xxhash.xxh3_64_intdigest, blocks))


@given(writes, sizes)
def test_what_is_written_is_passed_on(parts: list[bytes], block_bytes: int) -> None:
    assert hashed(parts, block_bytes)[1] == b"".join(parts)


@given(st.binary(max_size=200), sizes)
def test_a_file_hashes_as_the_stream_that_wrote_it(data: bytes, block_bytes: int) -> None:
    found = hash_file(io.BytesIO(data), block_bytes=block_bytes)
    assert (found.bytes, found.digest()) == (len(data), xxhash.xxh3_64_hexdigest(data))


@given(st.binary(max_size=200), sizes)
def test_the_number_of_blocks_is_known_beforehand(data: bytes, block_bytes: int) -> None:
    assert len(hash_file(io.BytesIO(data), block_bytes=block_bytes).blocks()) == block_count(
        len(data), block_bytes
    )


def test_asking_for_blocks_twice_gives_the_same() -> None:
    hashing, _ = hashed([b"12345"], 2)
    assert hashing.blocks() == hashing.blocks()


def test_a_memoryview_of_wide_items_counts_its_bytes() -> None:
    hashing = HashingFile(io.BytesIO(), block_bytes=16)
    hashing.write(memoryview(b"12345678").cast("I"))
    assert (hashing.bytes, hashing.digest()) == (8, xxhash.xxh3_64_hexdigest(b"12345678"))
