"""The look at JPEGs before a card gets them: what is called whole, the processor decodes without a word."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from pictures import SHAPES, encoded, photograph

from stoker.load.media.boxes import Crop
from stoker.load.media.decode import Decoder, Undecodable, choose_engine
from stoker.native import native

pytestmark = pytest.mark.usefixtures("in_c")

FRAME, SCAN, TABLES, EXIF, RESTARTS = 0xC0, 0xDA, 0xC4, 0xE1, 0xDD
USUAL = (
    "usual",
    "odd sides",
    "no subsampling",
    "half subsampling",
    "restarts",
    "grey",
    "one pixel",
    "turned 6",
)
ROUNDS, EACH = 40, 100  # of mutations: a second


@pytest.fixture(scope="module")
def survey(skip_or_fail: Callable[[str], None]) -> Callable[[list[bytes]], list[tuple[int, int, int]]]:
    module = native("load.media._survey")
    if not module:
        skip_or_fail("the C modules were not built")

    def look(files: list[bytes]) -> list[tuple[int, int, int]]:
        kept = [np.frombuffer(data or b"\0", np.uint8) for data in files]
        addresses = np.array([one.ctypes.data for one in kept], np.int64)
        sizes = np.array([len(data) for data in files], np.int64)
        known, found = np.zeros(len(files), np.uint8), np.zeros((len(files), 3), np.int32)
        module.survey(len(files), *(one.ctypes.data for one in (addresses, sizes, known, found)))
        return [tuple(row) for row in found.tolist()]

    return look


def segment(marker: int, inside: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(inside) + 2) + inside


def before(data: bytes, marker: int, more: bytes) -> bytes:
    at = data.index(bytes([0xFF, marker]))
    return data[:at] + more + data[at:]


def by_processor(data: bytes) -> tuple[int, int, int]:
    """Decoded in its own size; its width, height and turn."""
    seen: list[tuple[int, int, int]] = []

    def draw(width: int, height: int, turn: int) -> Crop:
        seen.append((width, height, turn))
        box = (0, 0, width, height)
        return Crop(box=box, clip=box, width=width, height=height, mirrored=False)

    Decoder(choose_engine("libjpeg"), max_pixels=10**6).crops(data, [draw], [None])
    return seen[0]


@pytest.mark.parametrize("shape", USUAL)
def test_usual_ones_are_whole(survey: Any, shape: str) -> None:
    data = SHAPES[shape]()
    assert survey([data]) == [by_processor(data)]
    assert survey([data[: len(data) - cut] for cut in (1, 2, 3, 50)]) == [(0, 0, survey([data])[0][2])] * 4


@pytest.mark.parametrize("shape", ["progressive", "cmyk", "png", "webp"])
def test_others_are_left_to_the_processor(survey: Any, shape: str) -> None:
    assert survey([SHAPES[shape]()])[0][0] == 0


def test_a_turn_that_not_all_would_find_is_left_to_the_processor(survey: Any) -> None:
    turn = b"Exif\0\0II*\0\x08\0\0\0\1\0\x12\1\3\0\1\0\0\0\6\0\0\0"
    plain = encoded(photograph(20, 30))
    early = before(plain, FRAME, segment(EXIF, turn))
    late = before(plain, SCAN, segment(EXIF, turn))
    assert survey([early]) == [by_processor(early)] == [(30, 20, 6)]
    assert survey([late])[0][0] == 0
    assert by_processor(late) == (30, 20, 1)


def drawn(bits: str, *, dc: tuple[bytes, bytes] = (b"\1", b"\0")) -> bytes:
    """A grey block of these bits: `dc` are counts of codes and their values; of AC 00 are 16 zeros, 01 14 of
    them and a number of one bit, 10 the end."""

    def table(which: int, counts: bytes, values: bytes) -> bytes:
        return segment(TABLES, bytes([which]) + counts.ljust(16, b"\0") + values)

    size = struct.pack(">BHHBBBB", 8, 8, 8, 1, 1, 0x11, 0)
    head = b"\xff\xd8" + segment(0xDB, bytes([0] + [1] * 64)) + segment(FRAME, size)
    tables = table(0, *dc) + table(0x10, b"\0\3", b"\xf0\xe1\0")
    start = segment(SCAN, bytes([1, 1, 0, 0, 63, 0]))
    bits += "1" * (-len(bits) % 8)
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big")
    return head + tables + start + scan + b"\xff\xd9"


def test_codes_of_ones_alone_are_left_to_the_processor(survey: Any) -> None:
    """libjpeg takes no such table."""
    usual, ones = drawn("010"), drawn("010", dc=(b"\2", b"\0\1"))
    assert [one[0] for one in survey([usual, ones])] == [8, 0]
    assert by_processor(usual) == (8, 8, 1)
    with pytest.raises(Undecodable, match="Bogus Huffman table"):
        by_processor(ones)


def test_of_many_tables_only_those_of_the_scan_are_made(survey: Any) -> None:
    """Two megabytes of others took 1.5 s."""
    data = encoded(photograph(20, 20))
    more = [bytes([0x13, 1, *[0] * 15, n % 2]) for n in range(3600)]
    assert survey([before(data, SCAN, segment(TABLES, b"".join(more)) * 40)]) == [(20, 20, 1)]


def test_more_pixels_across_than_libjpeg_takes_are_left_to_it(survey: Any) -> None:
    data = encoded(np.zeros((8, 65500), np.uint8), quality=5)
    wider = bytearray(data)
    at = data.index(bytes([0xFF, FRAME])) + 7
    wider[at : at + 2] = struct.pack(">H", 65504)  # as many blocks
    assert survey([data, bytes(wider)]) == [(65500, 8, 1), (0, 0, 1)]


def test_a_run_beyond_its_block_is_left_to_the_processor(survey: Any) -> None:
    """libjpeg says nothing of it, and decoders need not agree on what it is."""
    ended, full, beyond = drawn("010"), drawn("0" + "000000" + "010"), drawn("0" + "00000000")
    assert [one[0] for one in survey([ended, full, beyond])] == [8, 8, 0]
    assert by_processor(beyond) == (8, 8, 1)


def test_whatever_is_whole_after_mutations_the_processor_decodes(survey: Any) -> None:
    rng = np.random.default_rng(0)
    bases = [encoded(photograph(24, 31), subsampling=n) for n in range(3)]
    bases += [encoded(photograph(24, 31), restart_marker_blocks=1), encoded(photograph(9, 40)[..., 0])]
    whole = 0
    for _ in range(ROUNDS):
        files = [_mutated(rng, bases[int(rng.integers(len(bases)))]) for _ in range(EACH)]
        for data, (width, height, turn) in zip(files, survey(files), strict=True):
            if width and width * height < 10**6:
                whole += 1
                assert by_processor(data) == (width, height, turn)
    assert whole > ROUNDS  # some are


def _mutated(rng: np.random.Generator, data: bytes) -> bytes:
    """Bytes changed, mostly of the head; segments twice, in other places, and of others' making."""
    found = bytearray(data)
    head = data.index(bytes([0xFF, SCAN]))
    for _ in range(int(rng.integers(1, 4))):
        at, kind = int(rng.integers(2, head)), int(rng.integers(0, 8))
        if kind < 2:
            found[at] = int(rng.integers(256))
        elif kind == 2:
            found[int(rng.integers(2, len(found)))] ^= 1 << int(rng.integers(8))
        elif kind == 3:
            del found[int(rng.integers(2, len(found))) :]
        elif kind == 4:
            found += rng.bytes(9)
        elif kind == 5:
            frame = data.index(bytes([0xFF, FRAME])) + 5
            found[frame : frame + 4] = rng.choice([0, 1, 8, 16, 25, 40, 255], 4).astype(np.uint8).tobytes()
        else:
            more = [
                segment(RESTARTS, struct.pack(">H", int(rng.integers(4)))),
                segment(0xEE, b"Adobe\0d\0\0\0\0" + bytes([int(rng.integers(4))])),
                segment(
                    TABLES,
                    bytes([int(rng.choice([0, 1, 16, 17])), *rng.integers(0, 3, 3), *[0] * 13])
                    + rng.bytes(6),
                ),
                segment(EXIF, b"Exif\0\0II*\0\x08\0\0\0" + rng.bytes(20)),
            ][int(rng.integers(4))]
            where = bytes(found).find(bytes([0xFF, (FRAME, SCAN)[int(rng.integers(2))]]))
            found[max(where, 2) : max(where, 2)] = more
        if len(found) <= head:
            break
    return bytes(found)
