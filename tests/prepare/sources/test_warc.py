"""WARC and WET, as Common Crawl and warcio write them: a gzip member a record, damaged ones counted."""

from __future__ import annotations

import gzip
import random
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ReadAll = Callable[..., Any]

PAGE = (
    "<html><head><title>Coal</title></head><body><nav><a href='/'>Home</a></nav><article><h1>Coal</h1>"
    + "".join(
        f"<p>The fireman shovels coal into the firebox, for the {n}th time today.</p>" for n in range(9)
    )
    + "</article><footer>All rights reserved</footer></body></html>"
)


def record(kind: str, content: bytes, media: str = "text/plain") -> bytes:
    head = f"WARC/1.0\r\nWARC-Type: {kind}\r\nContent-Type: {media}\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content + b"\r\n\r\n"


def response(body: str, media: str = "text/html; charset=utf-8") -> bytes:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {media}\r\n\r\n"
    return record("response", head.encode() + body.encode(), "application/http; msgtype=response")


def texts(count: int) -> list[str]:
    chooser = random.Random(3)
    return [f"page {n}\n\nWARC/1.0 " + "".join(chooser.choices("abcäö \r\n", k=900)) for n in range(count)]


def wet(some: list[str]) -> list[bytes]:
    info = record("warcinfo", b"software: a crawler\r\n", "application/warc-fields")
    return [info, *(record("conversion", text.encode()) for text in some)]


PACK: dict[str, Callable[[list[bytes]], bytes]] = {
    "a.warc.wet.gz": lambda parts: b"".join(map(gzip.compress, parts)),
    "whole.wet.gz": lambda parts: gzip.compress(b"".join(parts)),
    "a.wet": b"".join,
}


@pytest.mark.parametrize("name", PACK)
def test_the_text_of_each_conversion_is_a_document(name: str, tmp_path: Path, read_all: ReadAll) -> None:
    some = texts(200)
    (tmp_path / name).write_bytes(PACK[name](wet(some)))
    found = read_all(tmp_path / name)
    assert (found.texts, found.bad) == (some, [])


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # warcio closes no scratch file
def test_what_warcio_writes_is_read(tmp_path: Path, read_all: ReadAll) -> None:
    import io

    writer = pytest.importorskip("warcio.warcwriter")
    with (tmp_path / "a.wet.gz").open("wb") as file:
        out = writer.WARCWriter(file, gzip=True)
        for text in texts(3):
            one = out.create_warc_record(
                "http://example.org/", "conversion", payload=io.BytesIO(text.encode()),
                warc_content_type="text/plain",
            )  # fmt: skip
            out.write_record(one)
    assert read_all(tmp_path / "a.wet.gz").texts == texts(3)


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_member_costs_its_own_record_only(seed: int, tmp_path: Path, read_all: ReadAll) -> None:
    some, chooser = texts(60), random.Random(seed)
    members = [bytearray(gzip.compress(part)) for part in wet(some)]
    hurt = sorted(chooser.sample(range(1, len(members), 2), 5))  # of two that touch one may hide the other
    for number in hurt:
        place = chooser.randrange(len(members[number]) - 4)
        members[number][place] ^= 1 << chooser.randrange(8)
    (tmp_path / "a.wet.gz").write_bytes(b"".join(members))
    found = read_all(tmp_path / "a.wet.gz")
    whole = [text for number, text in enumerate(some, start=1) if number not in hurt]
    assert [text for text in found.texts if text in whole] == whole
    assert set(found.texts) <= set(some)  # a bit of a header's time or name may change and hurt nothing
    assert len(found.texts) + sum(one.documents for one in found.bad) == len(some)


def test_a_file_that_is_cut_short_is_told(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.wet.gz").write_bytes(PACK["a.warc.wet.gz"](wet(texts(5)))[:-20])
    found = read_all(tmp_path / "a.wet.gz")
    assert found.texts == texts(4)
    assert [one.reason for one in found.bad] == ["truncated"]


def test_a_record_over_the_limit_is_passed_over(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.wet.gz").write_bytes(PACK["a.warc.wet.gz"](wet(["one", "x" * 9000, "two"])))
    found = read_all(tmp_path / "a.wet.gz", max_document_bytes=1000)
    assert (found.texts, [one.reason for one in found.bad]) == (["one", "two"], ["too_long"])


def test_plain_records_behind_damage_are_found_again(tmp_path: Path, read_all: ReadAll) -> None:
    parts = wet(["one", "two", "three"])
    parts[2] = parts[2].replace(b"Content-Length: ", b"Content-Lungth: ")
    (tmp_path / "a.wet").write_bytes(b"".join(parts))
    found = read_all(tmp_path / "a.wet")
    assert (found.texts, [one.reason for one in found.bad]) == (["one", "three"], ["truncated"])


def test_the_main_text_of_pages_is_taken_out_of_responses(tmp_path: Path, read_all: ReadAll) -> None:
    pytest.importorskip("trafilatura")
    parts = [
        record("request", b"GET / HTTP/1.1\r\n\r\n", "application/http; msgtype=request"),
        response(PAGE),
        response("as it is", "text/plain"),
        response("\x89PNG", "image/png"),
    ]
    (tmp_path / "a.warc.gz").write_bytes(PACK["a.warc.wet.gz"](parts))
    found = read_all(tmp_path / "a.warc.gz")
    assert len(found.texts) == 2
    assert found.texts[0].count("shovels coal") == 9
    assert "Home" not in found.texts[0]
    assert (found.texts[1], found.bad) == ("as it is", [])
