"""Tables with bytes of media, and tars of other people, become the same kind of shards."""

from __future__ import annotations

import io
import json
import tarfile
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_photos import encoded, photo

from stoker.errors import TaskError, UsageError
from stoker.prepare.media.recipe import MediaOptions

if TYPE_CHECKING:
    from pathlib import Path

IMAGES = [encoded(photo(number)) for number in range(10)]


def hugging_face_table() -> pa.Table:
    columns = {
        "image": [{"bytes": data, "path": f"{number}.jpg"} for number, data in enumerate(IMAGES)],
        "label": [number % 2 for number in range(10)],
        "caption": [f"caption {number}" for number in range(10)],
        "width": [96] * 10,
    }
    features = {"info": {"features": {"label": {"names": ["no", "yes"], "_type": "ClassLabel"}}}}
    return pa.table(columns).replace_schema_metadata({"huggingface": json.dumps(features)})


def check_rows(samples: list[dict[str, Any]]) -> None:
    assert len(samples) == 10
    for sample in samples:
        number = IMAGES.index(sample["jpg"])
        assert sample["cls"] == str(number % 2).encode()
        assert sample["txt"] == b"caption %d" % number
        assert json.loads(sample["json"]) == {"width": 96}


@pytest.mark.parametrize("row_group", [3, 100])
def test_parquet_with_the_struct_of_hugging_face(row_group: int, take: Any, tmp_path: Path) -> None:
    pq.write_table(hugging_face_table(), tmp_path / "x.parquet", row_group_size=row_group)
    check_rows(take(tmp_path / "x.parquet"))
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["no", "yes"]


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_files_and_streams(kind: str, take: Any, tmp_path: Path) -> None:
    table = hugging_face_table()
    opener = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with opener(tmp_path / "x.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    check_rows(take(tmp_path / "x.arrow"))


def test_a_dataset_saved_by_datasets(take: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    features = datasets.Features(
        {
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=["no", "yes"]),
            "caption": datasets.Value("string"),
            "width": datasets.Value("int64"),
        }
    )
    dataset = datasets.Dataset.from_dict(hugging_face_table().to_pydict(), features=features)
    dataset.select(range(9, -1, -1)).save_to_disk(tmp_path / "saved")
    check_rows(take(tmp_path / "saved"))
    assert json.loads((tmp_path / "out" / "classes.json").read_text()) == ["no", "yes"]


def test_several_columns_of_media_are_several_members(take: Any, tmp_path: Path) -> None:
    sound = b"fLaC" + bytes(50)
    table = pa.table({"photo": [IMAGES[0]], "Ton 1": [sound], "x": [b"?" * 20]})
    pq.write_table(table, tmp_path / "x.parquet")
    assert [sorted(one) for one in take(tmp_path / "x.parquet")] == [
        ["Ton_11.flac", "__key__", "photo.jpg", "x.bin"]
    ]


def test_a_list_of_images_is_as_many_members_and_nan_is_null(take: Any, tmp_path: Path) -> None:
    images = [[{"bytes": data, "path": None} for data in IMAGES[first : first + 3]] for first in (0, 3)]
    pq.write_table(pa.table({"images": images, "score": [0.5, float("nan")]}), tmp_path / "x.parquet")
    samples = take(tmp_path / "x.parquet")
    assert [sorted(one) for one in samples] == [["0.jpg", "1.jpg", "2.jpg", "__key__", "json"]] * 2
    assert {json.loads(one["json"])["score"] for one in samples} == {0.5, None}


def test_a_row_without_bytes_is_bad_and_a_path_in_it_is_not_followed(take: Any, tmp_path: Path) -> None:
    rows = [{"bytes": None, "path": "/etc/passwd"}, {"bytes": IMAGES[0], "path": None}, None]
    pq.write_table(pa.table({"image": rows}), tmp_path / "x.parquet")
    with pytest.raises(TaskError, match="row 0: no_bytes"):
        take(tmp_path / "x.parquet")
    samples = take(tmp_path / "x.parquet", on_error="skip", out=tmp_path / "skipped")
    assert [one["jpg"] for one in samples] == [IMAGES[0]]
    assert json.loads((tmp_path / "skipped" / "statistics.json").read_text())["bad"] == {"no_bytes": 2}


def test_a_table_of_text_is_text(make: Any, tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "x.parquet")
    assert make(tmp_path / "x.parquet").manifest.format == "megatron"


def test_a_table_of_text_with_hashes_beside_is_text(make: Any, take: Any, tmp_path: Path) -> None:
    hashes = [sha256(b"%d" % number).digest() for number in range(20)]
    table = pa.table({"text": [f"document {number}" for number in range(20)], "sha256": hashes})
    pq.write_table(table, tmp_path / "x.parquet")
    assert make(tmp_path / "x.parquet").manifest.format == "megatron"
    said = MediaOptions(kind="media")
    assert len(take(tmp_path / "x.parquet", media=said, out=tmp_path / "said")) == 20


@pytest.mark.parametrize("name", ["pixels", "image"])
def test_bytes_of_images_are_media_whatever_their_column_is_called(
    name: str, take: Any, watcher: Any, tmp_path: Path
) -> None:
    with pa.ipc.new_file(tmp_path / "x.arrow", (table := pa.table({name: IMAGES})).schema) as writer:
        writer.write_table(table)
    assert len(take(tmp_path / "x.arrow")) == 10
    assert f"{tmp_path / 'x.arrow'}: media, not text: 1 table" in watcher.notes


def test_a_table_of_text_and_images_with_a_tokenizer_has_to_be_said(make: Any, tmp_path: Path) -> None:
    """Before media it was a corpus: nobody's text becomes something else unasked."""
    table = pa.table({"text": [f"page {number}" for number in range(10)], "image": IMAGES})
    pq.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(UsageError, match="a column of text and one of media"):
        make(tmp_path / "x.parquet")
    for kind, made in (("text", "megatron"), ("media", "webdataset")):
        said = make(tmp_path / "x.parquet", out=tmp_path / kind, media=MediaOptions(kind=kind))
        assert said.manifest.format == made


def write_tar(path: Path, samples: list[dict[str, bytes]], *, folder: str = "") -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for number, sample in enumerate(samples):
            for suffix, data in sample.items():
                member = tarfile.TarInfo(f"{folder}{number:04d}.{suffix}")
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return path


@pytest.mark.parametrize("name", ["x.tar", "x.tar.gz"])
def test_samples_of_a_tar_keep_all_of_their_members(name: str, take: Any, tmp_path: Path) -> None:
    given = [
        {"jpg": data, "seg.png": encoded(photo(number).convert("L"), "PNG"), "cls": b"7", "npy": b"any bytes"}
        for number, data in enumerate(IMAGES)
    ]
    write_tar(tmp_path / name, given)
    samples = take(tmp_path / name)
    found = [{suffix: data for suffix, data in one.items() if suffix != "__key__"} for one in samples]
    assert sorted(found, key=str) == sorted(given, key=str)
    statistics = json.loads((tmp_path / "out" / "statistics.json").read_text())
    assert statistics["media"]["classes"] == {"7": 10}


def test_tars_that_number_from_zero_each_do_not_mix_samples(take: Any, tmp_path: Path) -> None:
    for part in range(2):
        folder = tmp_path / "tars"
        folder.mkdir(exist_ok=True)
        write_tar(
            folder / f"{part}.tar", [{"jpg": data, "txt": b"%d" % part} for data in IMAGES[part * 5 :][:5]]
        )
    samples = take(tmp_path / "tars")
    assert len({one["__key__"] for one in samples}) == 10
    assert all(one["txt"] == b"%d" % (IMAGES.index(one["jpg"]) // 5) for one in samples)


def test_shards_beside_their_metadata_are_taken_alone(take: Any, watcher: Any, tmp_path: Path) -> None:
    """As img2dataset leaves them; and a dataset of our own."""
    folder = tmp_path / "scraped"
    folder.mkdir()
    for part in range(2):
        write_tar(folder / f"{part:05d}.tar", [{"jpg": data, "cls": b"1"} for data in IMAGES[part * 5 :][:5]])
        pq.write_table(pa.table({"url": ["http://x"] * 5}), folder / f"{part:05d}.parquet")
        (folder / f"{part:05d}_stats.json").write_text("{}")
    assert len(take(folder)) == 10
    assert f"{folder}: 2 tables without media left out" in watcher.notes
    again = take(tmp_path / "out", out=tmp_path / "again", seed=1)
    assert sorted(one["jpg"] for one in again) == sorted(IMAGES)


def test_a_large_member_of_a_tar_is_streamed(take: Any, tmp_path: Path) -> None:
    film = b"\0\0\0\x18ftypmp42" + bytes(range(256)) * (70 << 10)
    write_tar(tmp_path / "x.tar", [{"mp4": film, "json": b"{}"}])
    assert take(tmp_path / "x.tar")[0]["mp4"] == film


def test_a_tar_that_is_cut_short_gives_what_lies_before(take: Any, tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [{"jpg": data} for data in IMAGES])
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    samples = take(path, on_error="skip")
    assert 2 <= len(samples) < 10
    assert json.loads((tmp_path / "out" / "statistics.json").read_text())["bad"] == {"truncated": 1}


@pytest.mark.parametrize(
    "suffix", ["j\u00e9pg.jpg", "a" * 90 + ".jpg", "a..jpg"], ids=["not ASCII", "too long", "empty part"]
)
def test_a_member_whose_name_fits_no_header_is_named(suffix: str, take: Any, tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [{suffix: IMAGES[0]}, {"jpg": IMAGES[1]}])
    assert len(take(tmp_path / "x.tar", on_error="skip")) == 1
    assert json.loads((tmp_path / "out" / "statistics.json").read_text())["bad"] == {"bad_name": 1}
