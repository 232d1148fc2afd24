"""Text and JSONL: plain and compressed, whole and cut into byte ranges."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import random
import zlib
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.formats.zstd import zstd_module

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = ["one", "two\nlines", "", "drei: ä€😀", "last"]
PACK = {"": bytes, ".gz": gzip.compress, ".zst": lambda data: zstd_module().compress(data)}

# What lines are made of: multi-byte characters, blanks, carriage returns; never a newline.
line_texts = st.text(st.sampled_from("ab \t\r\u00e4\u20ac\U0001f600\u2028\u0085"), max_size=12)


def jsonl(texts: list[str], end: str = "\n") -> bytes:
    return "".join(json.dumps({"text": text}, ensure_ascii=False) + end for text in texts).encode()


@pytest.mark.parametrize("suffix", PACK)
def test_a_text_file_is_one_document(suffix: str, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix]("one\ntwo ä\n".encode()))
    assert read_all(path).texts == ["one\ntwo ä\n"]


@pytest.mark.parametrize("suffix", PACK)
def test_each_line_of_a_text_file_is_a_document_if_asked(
    suffix: str, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(PACK[suffix]("one\ntwo ä\nthree".encode()))
    assert read_all(path, lines=True).texts == ["one", "two ä", "three"]


@pytest.mark.parametrize("suffix", PACK)
def test_each_line_of_jsonl_is_a_document(suffix: str, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(PACK[suffix](jsonl(TEXTS)))
    assert read_all(path).texts == TEXTS


def test_the_field_can_be_chosen(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "no", "body": "yes"}\n')
    assert read_all(tmp_path / "a.jsonl", field="body").texts == ["yes"]


def test_several_gzip_members_are_read_as_one_file(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(["a"])) + gzip.compress(jsonl(["b"])))
    assert read_all(tmp_path / "a.jsonl.gz").texts == ["a", "b"]


def test_several_zstd_frames_are_read_as_one_file(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    compress = zstd_module().compress
    (tmp_path / "a.jsonl.zst").write_bytes(compress(jsonl(["a"])) + compress(jsonl(["b"])))
    assert read_all(tmp_path / "a.jsonl.zst").texts == ["a", "b"]


def test_a_zstd_file_with_a_long_window_is_read(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    zstd = zstd_module()
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 31})
    (tmp_path / "a.jsonl.zst").write_bytes(packer.compress(jsonl(["a", "b"])) + packer.flush())
    found = read_all(tmp_path / "a.jsonl.zst")
    assert (found.texts, found.bad) == (["a", "b"], [])


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt", "lines.txt"])
def test_a_byte_order_mark_is_no_part_of_the_text(
    name: str, suffix: str, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    content = jsonl(["ä"]) if "json" in name else "ä".encode()
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(PACK[suffix](b"\xef\xbb\xbf" + content))
    found = read_all(path, lines=name.startswith("lines"), split_bytes=2)
    assert (found.texts, found.bad) == (["ä"], [])


@given(
    lines=st.lists(st.one_of(st.just(""), line_texts), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
    final=st.booleans(),
    split_bytes=st.integers(1, 60),
)
def test_jsonl_cut_anywhere_gives_each_line_once(
    lines: list[str], end: str, final: bool, split_bytes: int, scratch: Path, read_all: Callable[..., Any]
) -> None:
    """Blank lines stand between records; `final` says whether the last line has its newline."""
    records = [json.dumps({"text": text}, ensure_ascii=False) if text else "" for text in lines]
    data = end.join(records) + (end if final else "")
    (scratch / "a.jsonl").write_bytes(data.encode())
    found = read_all(scratch / "a.jsonl", split_bytes=split_bytes)
    assert (found.texts, found.bad) == ([text for text in lines if text], [])


@given(
    lines=st.lists(line_texts.filter(lambda text: not text.endswith("\r")), max_size=12),
    end=st.sampled_from(["\n", "\r\n"]),
    final=st.booleans(),
    split_bytes=st.integers(1, 40),
)
def test_text_cut_anywhere_gives_each_line_once(
    lines: list[str], end: str, final: bool, split_bytes: int, scratch: Path, read_all: Callable[..., Any]
) -> None:
    data = end.join(lines) + (end if final else "")
    (scratch / "a.txt").write_bytes(data.encode())
    found = read_all(scratch / "a.txt", lines=True, split_bytes=split_bytes)
    assert [text for text in found.texts if text.strip()] == [text for text in lines if text.strip()]


@given(sizes=st.lists(st.integers(0, 30), min_size=1, max_size=12), split_bytes=st.integers(1, 60))
def test_places_are_the_byte_offsets_of_the_lines(
    sizes: list[int], split_bytes: int, scratch: Path, read_all: Callable[..., Any]
) -> None:
    lines = [jsonl(["x" * size]) for size in sizes]
    (scratch / "a.jsonl").write_bytes(b"".join(lines))
    found = read_all(scratch / "a.jsonl", split_bytes=split_bytes)
    assert [place for _, place in found.places] == [len(b"".join(lines[:n])) for n in range(len(lines))]


def test_a_large_file_is_cut_into_pieces(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["x" * 90] * 100))
    assert read_all(tmp_path / "a.jsonl", split_bytes=1000).pieces == 10


def test_a_compressed_file_is_read_in_one_go(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(["x" * 90] * 100)))
    assert read_all(tmp_path / "a.jsonl.gz", split_bytes=10).pieces == 1


def test_lines_longer_than_a_block_are_whole(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    texts = ["a" * 5_000_000, "b", "ü" * 3_000_000]
    (tmp_path / "a.jsonl").write_bytes(jsonl(texts))
    assert read_all(tmp_path / "a.jsonl").texts == texts


BAD = [
    (b'{"text": "\xff"}', "invalid_utf8"),
    (b'{"text": "cut', "invalid_json"),
    (b'{"body": "x"}', "missing_field"),
    (b'{"text": 3}', "not_text"),
    (b'["text"]', "not_text"),
    (b'{"text": null}', "not_text"),
]


@pytest.mark.parametrize(
    ("line", "reason"), BAD, ids=[f"{reason}-{number}" for number, (_, reason) in enumerate(BAD)]
)
def test_a_bad_line_is_reported_with_its_reason(
    line: bytes, reason: str, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["before"]) + line + b"\n" + jsonl(["after"]))
    assert [bad.reason for bad in read_all(tmp_path / "a.jsonl").bad] == [reason]


def test_lines_around_a_bad_one_are_kept(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["before"]) + b"{\n" + jsonl(["after"]))
    assert read_all(tmp_path / "a.jsonl").texts == ["before", "after"]


def test_a_bad_line_is_named_by_file_and_offset(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl(["before"]) + b"{\n")
    (bad,) = read_all(path).bad
    assert bad.where == f"{path} at byte {len(jsonl(['before']))}"


def test_a_record_over_the_limit_is_reported(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl(["short", "long" * 100, "short too"]))
    found = read_all(tmp_path / "a.jsonl", max_document_bytes=200)
    assert (found.texts, [bad.reason for bad in found.bad]) == (["short", "short too"], ["too_long"])


@given(
    sizes=st.lists(st.integers(0, 100), max_size=12),
    limit=st.integers(20, 120),
    split_bytes=st.integers(1, 300),
)
def test_the_limit_falls_on_the_same_records_however_a_file_is_cut(
    sizes: list[int], limit: int, split_bytes: int, scratch: Path, read_all: Callable[..., Any]
) -> None:
    (scratch / "a.jsonl").write_bytes(jsonl(["x" * size for size in sizes]))
    found = read_all(scratch / "a.jsonl", max_document_bytes=limit, split_bytes=split_bytes)
    whole = read_all(scratch / "a.jsonl", max_document_bytes=limit)
    assert (found.texts, len(found.bad)) == (whole.texts, len(whole.bad))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_compressed_file_is_reported(suffix: str, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = tmp_path / f"a.jsonl{suffix}"
    packed = PACK[suffix](jsonl([str(number) * 20 for number in range(5000)]))
    path.write_bytes(packed[: len(packed) // 2])
    (bad,) = read_all(path).bad
    assert (bad.reason, bad.where.startswith(str(path))) == ("truncated", True)


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_an_empty_file_holds_no_bad_record(
    name: str, suffix: str, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    (tmp_path / f"{name}{suffix}").write_bytes(PACK[suffix](b""))
    assert read_all(tmp_path / f"{name}{suffix}").bad == []


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".xz", ".bz2"])
@pytest.mark.parametrize("lines", [50, 5000])
def test_whole_lines_before_the_cut_of_a_compressed_file_are_read(
    suffix: str, lines: int, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    chooser = random.Random(lines)
    texts = [f"{number} {chooser.randbytes(40).hex()}" for number in range(lines)]
    packers = {**PACK, ".xz": lzma.compress, ".bz2": lambda data: bz2.compress(data, 1)}
    packed = packers[suffix](jsonl(texts))
    (tmp_path / f"a.jsonl{suffix}").write_bytes(packed[:-9])
    unpacker = {
        ".gz": lambda: zlib.decompressobj(31),
        ".zst": lambda: zstd_module().ZstdDecompressor(),
        ".xz": lzma.LZMADecompressor,
        ".bz2": bz2.BZ2Decompressor,
    }[suffix]()
    readable = unpacker.decompress(packed[:-9]).count(b"\n")
    found = read_all(tmp_path / f"a.jsonl{suffix}")
    assert found.texts == texts[:readable]
    assert [bad.reason for bad in found.bad] == ["truncated"]
