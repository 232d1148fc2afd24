"""Our Megatron index against megatron-core's own reader and writer."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadShardError
from stoker.formats.megatron import check_pair, index_bytes, read_index, token_dtype

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = [np.dtype("<u2"), np.dtype("<i4")]


@pytest.fixture(scope="module")
def documents() -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng(7)
    return [random.integers(0, 60_000, size).astype(np.int64) for size in (5, 1, 300, 17, 2048)]


def parse(data: bytes) -> Any:
    return read_index(io.BytesIO(data), name="x.idx")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_index_is_byte_identical_to_megatrons(
    dtype: np.dtype[Any], documents: list[np.ndarray[Any, Any]], megatron: Any, tmp_path: Path
) -> None:
    builder = megatron.IndexedDatasetBuilder(str(tmp_path / "x.bin"), dtype=dtype.type)
    for document in documents:
        builder.add_document(document, [len(document)])
    builder.finalize(str(tmp_path / "x.idx"))
    lengths = np.array([len(document) for document in documents])
    assert index_bytes(lengths, dtype=dtype) == (tmp_path / "x.idx").read_bytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_megatron_reads_our_pair(
    dtype: np.dtype[Any], documents: list[np.ndarray[Any, Any]], megatron: Any, tmp_path: Path
) -> None:
    (tmp_path / "x.bin").write_bytes(np.concatenate(documents).astype(dtype).tobytes())
    (tmp_path / "x.idx").write_bytes(index_bytes(np.array(list(map(len, documents))), dtype=dtype))
    dataset = megatron.IndexedDataset(str(tmp_path / "x"))
    assert [dataset[number].tolist() for number in range(len(dataset))] == [d.tolist() for d in documents]


@given(st.lists(st.integers(0, 2**20), max_size=50), st.sampled_from(DTYPES))
def test_lengths_come_back_from_an_index(lengths: list[int], dtype: np.dtype[Any]) -> None:
    found = parse(index_bytes(np.array(lengths, np.int64), dtype=dtype))
    assert (found.lengths.tolist(), found.dtype, found.tokens) == (lengths, dtype, sum(lengths))


@given(st.lists(st.integers(0, 2**20), max_size=50), st.sampled_from(DTYPES))
def test_an_index_of_ours_fits_its_tokens(lengths: list[int], dtype: np.dtype[Any]) -> None:
    found = parse(index_bytes(np.array(lengths, np.int64), dtype=dtype))
    check_pair(found, bin_bytes=sum(lengths) * dtype.itemsize, name="x.idx")


def test_offsets_of_more_than_four_gigabytes_do_not_overflow() -> None:
    found = parse(index_bytes(np.full(4, 2**31 - 1, np.int64), dtype=np.dtype("<i4")))
    assert found.offsets.tolist() == [n * (2**31 - 1) * 4 for n in range(4)]


@given(st.data())
def test_a_cut_index_is_refused(data: st.DataObject) -> None:
    whole = index_bytes(np.array([3, 4, 5]), dtype=np.dtype("<u2"))
    size = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(BadShardError, match=r"x\.idx"):
        parse(whole[:size])


def test_a_foreign_file_is_refused() -> None:
    with pytest.raises(BadShardError, match="does not start like a Megatron index"):
        parse(b"PK\x03\x04" * 20)


def test_a_bin_of_another_size_is_refused() -> None:
    found = parse(index_bytes(np.array([3, 4]), dtype=np.dtype("<u2")))
    with pytest.raises(BadShardError, match=r"describes 14 bytes of tokens, the \.bin holds 12"):
        check_pair(found, bin_bytes=12, name="x.idx")


@pytest.mark.parametrize(("vocabulary", "kind"), [(50_257, "uint16"), (65_499, "uint16"), (65_500, "int32")])
def test_the_token_type_follows_megatrons_rule(vocabulary: int, kind: str, megatron: Any) -> None:
    theirs = megatron.DType.optimal_dtype(vocabulary)
    assert token_dtype(vocabulary).name == kind == np.dtype(theirs).name
