"""Our tars against tarfile and webdataset, and the index against the tar."""

from __future__ import annotations

import io
import os
import tarfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import BadShardError, UsageError
from stoker.formats.tar import TarIndex, TarWriter, index_bytes, read_index, scan

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

Samples = list[tuple[str, list[tuple[str, bytes]]]]

# A key is a name without a dot (a reader takes what follows the first dot for the member's suffix).
names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="./"), min_size=1, max_size=12
)
members = st.lists(
    st.tuples(names, st.binary(max_size=1100)), min_size=1, max_size=4, unique_by=lambda m: m[0]
)
samples = st.lists(st.tuples(names, members), max_size=5, unique_by=lambda sample: sample[0])


def written(content: Samples) -> tuple[bytes, TarIndex]:
    sink = io.BytesIO()
    writer = TarWriter(sink)
    for key, parts in content:
        writer.add(key, parts)
    index = writer.close()
    return sink.getvalue(), index


def indexed(data: bytes, index: TarIndex) -> Samples:
    """The samples as the index finds them."""
    found = []
    for number in range(len(index)):
        rows = range(index.starts[number], index.starts[number + 1])
        parts = [
            (index.suffixes[index.suffix[row]], data[index.offset[row] : index.offset[row] + index.size[row]])
            for row in rows
        ]
        found.append((index.keys[number].decode(), parts))
    return found


def flat(content: Samples) -> list[tuple[str, bytes]]:
    return [(f"{key}.{suffix}", data) for key, parts in content for suffix, data in parts]


@settings(max_examples=40)
@given(samples)
def test_tarfile_reads_every_member_back(content: Samples) -> None:
    with tarfile.open(fileobj=io.BytesIO(written(content)[0])) as archive:
        found = [(member.name, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]
    assert found == flat(content)


@settings(max_examples=40)
@given(samples)
def test_the_index_points_at_every_member(content: Samples) -> None:
    assert indexed(*written(content)) == content


@settings(max_examples=40)
@given(samples)
def test_scanning_a_tar_gives_the_index_of_its_writer(content: Samples) -> None:
    data, index = written(content)
    assert indexed(data, scan(io.BytesIO(data), name="x.tar")) == indexed(data, index)


@settings(max_examples=40)
@given(samples)
def test_an_index_is_read_back_equal(content: Samples) -> None:
    data, index = written(content)
    assert indexed(data, read_index(io.BytesIO(index_bytes(index)), name="x")) == content


@settings(max_examples=40)
@given(samples)
def test_the_same_samples_give_the_same_bytes(content: Samples) -> None:
    first, second = written(content), written(content)
    assert (first[0], index_bytes(first[1])) == (second[0], index_bytes(second[1]))


@settings(max_examples=40)
@given(samples)
def test_a_tar_fills_whole_records(content: Samples) -> None:
    assert len(written(content)[0]) % 10240 == 0


SAMPLES: Samples = [
    (f"{n:06d}", [("token_ids.json", b"[1, 2]"), ("text.txt", b"text %d" % n)]) for n in range(40)
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # it leaves its file open
def test_webdataset_reads_our_samples(webdataset: Any, tmp_path: Path) -> None:
    (tmp_path / "x.tar").write_bytes(written(SAMPLES)[0])
    dataset = webdataset.WebDataset(str(tmp_path / "x.tar"), shardshuffle=False)
    found = [(sample["__key__"], sample["token_ids.json"], sample["text.txt"]) for sample in dataset]
    assert found == [(key, parts[0][1], parts[1][1]) for key, parts in SAMPLES]


def test_a_tar_of_webdatasets_writer_is_scanned(webdataset: Any, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "x.tar")) as writer:
        for key, parts in SAMPLES:
            writer.write({"__key__": key, **dict(parts)})
    data = (tmp_path / "x.tar").read_bytes()
    found = indexed(data, scan(io.BytesIO(data), name="x.tar"))
    assert [(key, dict(parts)) for key, parts in found] == [(key, dict(parts)) for key, parts in SAMPLES]


@pytest.mark.parametrize("cut", [1, 512, 10_000, 512 * 41], ids=str)
def test_a_cut_tar_is_refused(cut: int) -> None:
    with pytest.raises(BadShardError, match=r"x\.tar"):
        scan(io.BytesIO(written(SAMPLES)[0][:cut]), name="x.tar")


def test_a_tar_cut_between_two_members_is_refused() -> None:
    data, index = written(SAMPLES)
    with pytest.raises(BadShardError, match=r"x\.tar is cut short"):
        scan(io.BytesIO(data[: int(index.offset[20]) - 512]), name="x.tar")


def test_a_damaged_header_is_refused() -> None:
    data = bytearray(written(SAMPLES)[0])
    data[1024 * 4 + 130] ^= 0xFF
    with pytest.raises(BadShardError, match=r"x\.tar"):
        scan(io.BytesIO(bytes(data)), name="x.tar")


def test_a_name_too_long_for_a_header_is_refused() -> None:
    with pytest.raises(UsageError, match="does not fit a ustar header"):
        TarWriter(io.BytesIO()).add("k" * 99, [("txt", b"")])


def test_a_foreign_index_is_refused() -> None:
    with pytest.raises(BadShardError, match="x"):
        read_index(io.BytesIO(b"not an npz"), name="x")


def test_a_sample_in_a_folder_keeps_its_folder_in_the_key() -> None:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a.b/0001.txt"), io.BytesIO())
    index = scan(io.BytesIO(sink.getvalue()), name="x.tar")
    assert (index.keys.tolist(), index.suffixes) == ([b"a.b/0001"], ("txt",))


def test_offsets_are_wide_enough_for_large_tars() -> None:
    assert written(SAMPLES)[1].offset.dtype == np.int64


def foreign_tar(names: Sequence[str]) -> io.BytesIO:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    file.seek(0)
    return file


def test_members_that_belong_to_no_sample_are_passed_over() -> None:
    index = scan(foreign_tar(["README", ".hidden", "x/.DS_Store", "a.txt", "end."]), name="x.tar")
    assert index.keys.tolist() == [b"a"]


def test_a_member_that_comes_twice_is_refused() -> None:
    with pytest.raises(BadShardError, match=r"x\.tar holds 'a\.txt' twice"):
        scan(foreign_tar(["a.txt", "a.cls", "a.txt"]), name="x.tar")


def test_a_member_whose_name_is_no_utf8_is_indexed() -> None:
    index = scan(foreign_tar([os.fsdecode(b"caf\xe9.t\xe9xt")]), name="x.tar")
    again = read_index(io.BytesIO(index_bytes(index)), name="x.index.npz")
    assert (again.keys.tolist(), again.suffixes) == ([b"caf\xe9"], (os.fsdecode(b"t\xe9xt"),))


def test_more_kinds_of_members_than_an_index_can_number_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stoker.formats.tar._MOST_SUFFIXES", 3)
    with pytest.raises(BadShardError, match=r"the last is '3\.txt'"):
        scan(foreign_tar([f"sample.{number}.txt" for number in range(5)]), name="x.tar")
