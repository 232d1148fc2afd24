"""WebDataset tars as a source."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def make_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("suffix", ["txt", "text.txt", "text"])
def test_a_text_member_is_a_document(suffix: str, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    members = [(f"{number:04d}.{suffix}", f"text {number} ä".encode()) for number in range(5)]
    assert read_all(make_tar(tmp_path / "a.tar", members)).texts == [f"text {n} ä" for n in range(5)]


def test_the_field_of_a_json_member_is_a_document(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    members = [("a/0001.json", json.dumps({"text": "hello"}).encode())]
    assert read_all(make_tar(tmp_path / "a.tar", members)).texts == ["hello"]


def test_other_members_are_left_alone(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    members = [("1.jpg", b"\xff\xd8"), ("1.txt", b"caption"), ("1.token_ids.json", b"[1]")]
    assert read_all(make_tar(tmp_path / "a.tar", members)).texts == ["caption"]


@pytest.mark.parametrize("order", [1, -1], ids=["text-first", "json-first"])
def test_a_sample_with_text_and_metadata_is_one_document(
    order: int, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    members = [("1.txt", b"caption"), ("1.json", b'{"width": 3}')][::order]
    found = read_all(make_tar(tmp_path / "a.tar", members))
    assert (found.texts, found.bad) == (["caption"], [])


def test_a_compressed_tar_is_read(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    plain = make_tar(tmp_path / "plain", [("1.txt", b"one"), ("2.txt", b"two")])
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(plain.read_bytes()))
    assert read_all(tmp_path / "a.tar.gz").texts == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("1.txt", b"\xff", "invalid_utf8"),
        ("1.json", b"{", "invalid_json"),
        ("1.json", b"{}", "missing_field"),
        ("1.json", b'{"text": 1}', "not_text"),
        ("1.txt", b"x" * 300, "too_long"),
        ("1.json", b'{"text": "%s"}' % (b"x" * 300), "too_long"),
    ],
)
def test_a_bad_member_is_reported_by_name(
    name: str, content: bytes, reason: str, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    path = make_tar(tmp_path / "a.tar", [(name, content), ("2.txt", b"fine")])
    found = read_all(path, max_document_bytes=200)
    assert [(bad.reason, bad.where.startswith(f"{path} member {name}")) for bad in found.bad] == [
        (reason, True)
    ]


def test_members_after_a_bad_one_are_read(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = make_tar(tmp_path / "a.tar", [("1.txt", b"\xff"), ("2.txt", b"fine")])
    assert read_all(path).texts == ["fine"]


def test_a_cut_tar_is_reported(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = make_tar(tmp_path / "a.tar", [(f"{n}.txt", b"x" * 2000) for n in range(9)])
    path.write_bytes(path.read_bytes()[:7000])
    assert [bad.reason for bad in read_all(path).bad] == ["truncated"]


def test_a_tar_cut_between_two_members_is_reported(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    path = make_tar(tmp_path / "a.tar", [(f"{n}.txt", b"x" * 512) for n in range(9)])
    path.write_bytes(path.read_bytes()[: 1024 * 4])
    assert [bad.reason for bad in read_all(path).bad] == ["truncated"]
