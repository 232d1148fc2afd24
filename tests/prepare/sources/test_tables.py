"""Parquet, Arrow, and Hugging Face datasets on disk."""

from __future__ import annotations

import errno
import io
import warnings
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.errors import BadInputError, StorageError
from stoker.prepare.sources.discover import discover
from stoker.prepare.sources.documents import Piece, Reading
from stoker.prepare.sources.tables import read_table
from stoker.storage import LocalStore

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXTS = [f"document {number}: ä€😀" for number in range(100)]


@pytest.fixture
def table() -> pa.Table:
    return pa.table({"id": list(range(100)), "text": TEXTS})


@pytest.fixture(scope="module")
def datasets() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets
        from tqdm import tqdm
    datasets.disable_progress_bars()
    tqdm.monitor_interval = 0  # no thread that watches bars nobody sees
    return datasets


def test_parquet_is_read_in_order(table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    assert read_all(tmp_path / "a.parquet").texts == TEXTS


@pytest.mark.parametrize("split_bytes", [1, 1000, 1 << 20])
def test_row_groups_may_go_to_any_number_of_pieces(
    split_bytes: int, table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=13)
    found = read_all(tmp_path / "a.parquet", split_bytes=split_bytes)
    assert (found.texts, [place for _, place in found.places]) == (TEXTS, list(range(100)))


def test_a_parquet_file_is_cut_between_row_groups(
    table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=13)
    assert read_all(tmp_path / "a.parquet", split_bytes=1).pieces == 8


@pytest.mark.parametrize("kind", ["large_string", "dictionary", "string_view"])
def test_every_string_type_is_text(kind: str, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    types = {
        "large_string": pa.large_string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
        "string_view": pa.string_view(),
    }
    column = pa.array(TEXTS).cast(types[kind])
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", types[kind])])) as writer:
        writer.write_batch(pa.record_batch({"text": column}))
    assert read_all(tmp_path / "a.arrow").texts == TEXTS


def test_a_null_is_a_missing_field(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    found = read_all(tmp_path / "a.parquet")
    assert [(bad.reason, bad.where) for bad in found.bad] == [
        ("missing_field", f"{tmp_path}/a.parquet row 1")
    ]


def test_a_column_of_numbers_is_not_text(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "a.parquet")
    assert {bad.reason for bad in read_all(tmp_path / "a.parquet").bad} == {"not_text"}


def test_a_table_without_the_column_is_refused(
    table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInputError, match=r"a\.parquet has no column 'body'"):
        read_all(tmp_path / "a.parquet", field="body")


def test_a_parquet_file_without_rows_is_empty(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("text", pa.string())])):
        pass
    found = read_all(tmp_path / "a.parquet")
    assert (found.texts, found.bad) == ([], [])


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_is_read_in_order(
    kind: str, table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    make = {"file": pa.ipc.new_file, "stream": pa.ipc.new_stream}[kind]
    with make(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    assert read_all(tmp_path / "a.arrow").texts == TEXTS


def test_an_arrow_file_is_cut_between_batches(
    table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    found = read_all(tmp_path / "a.arrow", split_bytes=1)
    assert (found.pieces, found.texts) == (10, TEXTS)


def test_an_arrow_table_without_the_column_is_refused(
    table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(BadInputError, match=r"a\.arrow has no column 'body'"):
        read_all(tmp_path / "a.arrow", field="body")


def test_invalid_utf8_in_a_string_column_is_reported(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    raw = pa.array([b"good", b"\xff\xfe", b"good too"], pa.binary())
    column = pa.Array.from_buffers(pa.string(), 3, raw.buffers())
    with pa.ipc.new_file(tmp_path / "a.arrow", pa.schema([("text", pa.string())])) as writer:
        writer.write_batch(pa.record_batch({"text": column}))
    found = read_all(tmp_path / "a.arrow")
    assert (found.texts, [bad.reason for bad in found.bad]) == (["good", "good too"], ["invalid_utf8"])


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_cut_table_is_reported(
    name: str, table: pa.Table, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    path = tmp_path / name
    if name == "a.parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    path.write_bytes(path.read_bytes()[:-200])
    (bad,) = read_all(path).bad
    assert (bad.reason, bad.where) == ("truncated", str(path))


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.tar"])
def test_an_empty_table_file_is_reported(name: str, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    (tmp_path / name).write_bytes(b"")
    (bad,) = read_all(tmp_path / name).bad
    assert bad.reason == "truncated"


def test_a_long_cell_is_reported(tmp_path: Path, read_all: Callable[..., Any]) -> None:
    pq.write_table(pa.table({"text": ["a", "b" * 500]}), tmp_path / "a.parquet")
    found = read_all(tmp_path / "a.parquet", max_document_bytes=100)
    assert (found.texts, [bad.reason for bad in found.bad]) == (["a"], ["too_long"])


def test_a_saved_dataset_is_read(datasets: Any, tmp_path: Path, read_all: Callable[..., Any]) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    assert read_all(tmp_path / "saved").texts == TEXTS


def test_a_saved_dataset_is_cut_between_rows(
    datasets: Any, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    found = read_all(tmp_path / "saved", split_bytes=100)
    assert (found.pieces > 5, found.texts) == (True, TEXTS)


def test_a_shuffled_dataset_keeps_its_own_order(
    datasets: Any, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    shuffled = datasets.Dataset.from_dict({"text": TEXTS}).shuffle(seed=3).select(range(50))
    shuffled.save_to_disk(tmp_path / "saved")
    assert read_all(tmp_path / "saved").texts == shuffled["text"][:]


def test_the_split_of_a_dataset_dict_can_be_chosen(
    datasets: Any, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    parts = {"train": TEXTS[:60], "test": TEXTS[60:]}
    datasets.DatasetDict(
        {name: datasets.Dataset.from_dict({"text": texts}) for name, texts in parts.items()}
    ).save_to_disk(tmp_path / "saved")
    assert read_all(tmp_path / "saved", split="test").texts == TEXTS[60:]


def test_an_unknown_split_names_the_known_ones(
    datasets: Any, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": TEXTS})}).save_to_disk(
        tmp_path / "saved"
    )
    with pytest.raises(BadInputError, match="has no split 'dev'") as caught:
        read_all(tmp_path / "saved", split="dev")
    assert "train" in caught.value.hint


@pytest.mark.parametrize(("name", "content"), [("state.json", "{"), ("*.arrow", "ARROW"), ("*.arrow", "")])
def test_a_damaged_saved_dataset_is_named(
    name: str, content: str, datasets: Any, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(tmp_path / "saved"))
    for path in (tmp_path / "saved").glob(name):
        path.write_text(content)
    with pytest.raises(BadInputError, match=r"cannot load the dataset in .*saved"):
        read_all(tmp_path / "saved")


def test_a_saved_dataset_without_the_column_is_refused(
    datasets: Any, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    with pytest.raises(BadInputError, match="has no column 'body'"):
        read_all(tmp_path / "saved", field="body")


def test_a_hub_dataset_is_loaded_by_its_name(
    datasets: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, read_all: Callable[..., Any]
) -> None:
    """A folder of data files is the one kind of hub dataset that can be loaded without a hub."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "hub").mkdir()
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "hub" / "train-00000.parquet")
    pq.write_table(pa.table({"text": ["other"]}), tmp_path / "hub" / "test-00000.parquet")
    assert read_all(f"hf://{tmp_path}/hub").texts == TEXTS


def test_a_hub_dataset_that_is_not_there_is_named(datasets: Any, read_all: Callable[..., Any]) -> None:
    with pytest.raises(BadInputError, match="cannot load hf://acme/nothing, split 'train'"):
        read_all("hf://acme/nothing")


class _Failing(io.FileIO):
    """A file on a disk that cannot read it."""

    def readinto(self, buffer: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("when", ["planned", "read"])
def test_a_disk_that_cannot_read_a_table_is_no_damaged_table(
    when: str, table: pa.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=2)
    name = str(tmp_path / "t.parquet")
    sources = [] if when == "planned" else discover([name])
    monkeypatch.setattr(LocalStore, "open", lambda store, path: _Failing(store.root / path))
    with pytest.raises(StorageError, match=r"cannot read .*t.parquet: Input/output error"):
        list(
            read_table(sources[0], Piece(source=0, start=0, stop=1), Reading())
            if sources
            else discover([name])
        )
