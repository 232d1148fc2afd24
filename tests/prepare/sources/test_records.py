"""What of a record is its text: nested fields, templates, and errors that name what is there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stoker.errors import BadInputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ReadAll = Callable[..., Any]

RECORDS = [
    {"id": 7, "data": {"text": "one", "parts": ["a", "b"]}, "title": "First", "a.b": "dotted"},
    {"id": 8, "data": {"text": "zwei: ä", "parts": ["c", "d"]}, "title": None, "a.b": "dotted too"},
]


def written(folder: Path, kind: str) -> Path:
    path = folder / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(one) + "\n" for one in RECORDS))
    elif kind == "json":
        path.write_text(json.dumps(RECORDS, indent=2))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(RECORDS), path)
    else:
        with (
            pa.OSFile(str(path), "wb") as file,
            pa.ipc.new_file(file, pa.Table.from_pylist(RECORDS).schema) as out,
        ):
            out.write_table(pa.Table.from_pylist(RECORDS))
    return path


KINDS = ["jsonl", "json", "parquet", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("field", "texts"),
    [
        ("data.text", ["one", "zwei: ä"]),
        ("data.parts.1", ["b", "d"]),
        ("a.b", ["dotted", "dotted too"]),
    ],
)
def test_a_field_may_lie_inside_another(
    kind: str, field: str, texts: list[str], tmp_path: Path, read_all: ReadAll
) -> None:
    found = read_all(written(tmp_path, kind), field=field)
    assert (found.texts, found.bad) == (texts, [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_template_joins_fields_and_writes_nothing_for_null(
    kind: str, tmp_path: Path, read_all: ReadAll
) -> None:
    template = r"{title}\n\n{data.text} {{{id}}}"  # \n as a shell hands it on
    found = read_all(written(tmp_path, kind), template=template)
    assert (found.texts, found.bad) == (["First\n\none {7}", "\n\nzwei: ä {8}"], [])


@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_a_field_that_is_missing_is_named_with_those_that_are_there(
    kind: str, tmp_path: Path, read_all: ReadAll
) -> None:
    found = read_all(written(tmp_path, kind), field="body")
    assert found.bad[0].reason == "missing_field"
    assert found.bad[0].detail == (
        "the record has no field 'body'; it has id, data, data.text, data.parts, title, a.b"
    )


@pytest.mark.parametrize("template", ["{title}{bodi}", "{data.txt}"])
def test_an_unknown_name_in_a_template_is_named(template: str, tmp_path: Path, read_all: ReadAll) -> None:
    found = read_all(written(tmp_path, "jsonl"), template=template)
    assert "has no field" in found.bad[0].detail
    assert "data.text" in found.bad[0].detail


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_column_that_is_missing_is_named_with_those_that_are_there(
    kind: str, tmp_path: Path, read_all: ReadAll
) -> None:
    with pytest.raises(BadInputError, match=r"no column 'bodi'; it has id, data, title, a\.b"):
        read_all(written(tmp_path, kind), template="{title} {bodi}")


@pytest.mark.parametrize("template", ["no names", "{}", "{title!r}", "{title:>9}", "{title", "title}"])
def test_a_template_that_means_nothing_is_refused(template: str, tmp_path: Path, read_all: ReadAll) -> None:
    with pytest.raises(UsageError, match="template"):
        read_all(written(tmp_path, "jsonl"), template=template)


def test_what_is_neither_text_nor_number_is_no_piece_of_a_template(tmp_path: Path, read_all: ReadAll) -> None:
    found = read_all(written(tmp_path, "jsonl"), template="{data}")
    assert [one.detail for one in found.bad] == ["data is an object, not a string"] * 2


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.dictionary(pa.int8(), pa.binary())])
def test_binary_columns_are_text_where_they_are_utf8(kind: Any, tmp_path: Path, read_all: ReadAll) -> None:
    values = [b"eins", b"\xff\xfe", "zwei ä".encode()]
    pq.write_table(pa.table({"text": pa.array(values, pa.binary()).cast(kind)}), tmp_path / "a.parquet")
    found = read_all(tmp_path / "a.parquet")
    assert found.texts == ["eins", "zwei ä"]
    assert [(one.reason, one.where.rpartition("/")[2]) for one in found.bad] == [
        ("invalid_utf8", "a.parquet row 1")
    ]


def test_a_field_of_a_tars_json_member_may_be_nested(tmp_path: Path, read_all: ReadAll) -> None:
    import io
    import tarfile

    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        data = json.dumps(RECORDS[0]).encode()
        member = tarfile.TarInfo("000.json")
        member.size = len(data)
        tar.addfile(member, io.BytesIO(data))
    assert read_all(tmp_path / "a.tar", field="data.text").texts == ["one"]
    assert read_all(tmp_path / "a.tar", template="{id}: {title}").texts == ["7: First"]
