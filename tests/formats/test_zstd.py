"""Seekable zstd: any stretch can be read alone, and any zstd program reads the whole."""

from __future__ import annotations

import io
import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadShardError
from stoker.formats.zstd import SeekableReader, SeekableWriter, zstd_module

if TYPE_CHECKING:
    from collections.abc import Callable

parts = st.lists(st.binary(max_size=200), max_size=8)
frames = st.integers(1, 100)


def packed(pieces: list[bytes], frame_bytes: int) -> bytes:
    sink = io.BytesIO()
    writer = SeekableWriter(sink, frame_bytes=frame_bytes)
    for piece in pieces:
        writer.write(piece)
    writer.close()
    return sink.getvalue()


def reader(data: bytes) -> io.BufferedReader:
    return io.BufferedReader(SeekableReader(io.BytesIO(data), name="x.zst"))


@given(parts, frames, st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 500)), max_size=6))
def test_any_stretch_can_be_read_alone(
    pieces: list[bytes], frame_bytes: int, stretches: list[tuple[int, int]]
) -> None:
    plain = b"".join(pieces)
    with reader(packed(pieces, frame_bytes)) as file:
        for start, size in stretches:
            file.seek(start)
            assert file.read(size) == plain[start : start + size]


@given(parts, frames)
def test_an_ordinary_reader_decompresses_the_whole(pieces: list[bytes], frame_bytes: int) -> None:
    with zstd_module().ZstdFile(io.BytesIO(packed(pieces, frame_bytes))) as file:
        assert file.read() == b"".join(pieces)


@given(parts, frames)
def test_the_size_is_known_without_decompressing(pieces: list[bytes], frame_bytes: int) -> None:
    with SeekableReader(io.BytesIO(packed(pieces, frame_bytes)), name="x") as file:
        assert file.size == len(b"".join(pieces))


def test_the_zstd_program_decompresses_the_whole(require_binary: Callable[[str], str]) -> None:
    data = packed([b"stoker " * 1000], 512)
    done = subprocess.run([require_binary("zstd"), "-dc"], input=data, capture_output=True, check=True)
    assert done.stdout == b"stoker " * 1000


def test_seeking_from_the_end_works() -> None:
    with reader(packed([b"0123456789"], 3)) as file:
        file.seek(-4, io.SEEK_END)
        assert file.read() == b"6789"


@pytest.mark.parametrize("cut", [0, 5, 50, -1], ids=["all", "head", "middle", "last-byte"])
def test_a_cut_file_is_refused(cut: int) -> None:
    with pytest.raises(BadShardError, match=r"x\.zst: no seek table"):
        reader(packed([b"0123456789" * 40], 64)[:cut])


def test_a_file_without_a_table_is_refused() -> None:
    with pytest.raises(BadShardError, match="never was seekable"):
        reader(zstd_module().compress(b"plain zstd"))


def test_a_damaged_frame_is_named() -> None:
    data = bytearray(packed([bytes(range(256))] * 4, 256))
    data[0] ^= 0xFF  # the magic number; damage further in is what the block digests are for
    with reader(bytes(data)) as file, pytest.raises(BadShardError, match=r"x\.zst: frame 0"):
        file.read()


def test_a_table_that_lies_about_a_frame_is_caught() -> None:
    data = packed([b"a" * 64, b"b" * 64], 64)
    frame = zstd_module().compress(b"a" * 63, level=3)
    table = data[len(data) - 9 - 16 :]
    swapped = frame + data[-(8 + 16 + 9) :][:8] + table
    size = len(frame).to_bytes(4, "little")
    lying = swapped[: len(frame) + 8] + size + table[4:8] + table[16:]
    lying = lying[:-9] + (1).to_bytes(4, "little") + lying[-5:]
    with (
        reader(lying) as file,
        pytest.raises(BadShardError, match="frame 0 holds 63 bytes, its table says 64"),
    ):
        file.read()


def test_the_underlying_file_is_closed_with_the_reader() -> None:
    inner = io.BytesIO(packed([b"x"], 8))
    SeekableReader(inner, name="x").close()
    assert inner.closed
