"""CSV and TSV: quoted fields, rows that are none, files without the header that was asked for."""

from __future__ import annotations

import csv
import gzip
import io
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ReadAll = Callable[..., Any]

cells = st.text(st.sampled_from('ab,\t"\n\r \u00e4\u2028'), max_size=9)


def packed(rows: list[list[str]], delimiter: str = ",") -> bytes:
    out = io.StringIO(newline="")
    csv.writer(out, delimiter=delimiter).writerows(rows)
    return out.getvalue().encode()


@given(rows=st.lists(st.tuples(cells, cells), max_size=5), kind=st.sampled_from(["csv", "tsv"]))
def test_what_pythons_writer_wrote_comes_back(
    rows: list[tuple[str, str]], kind: str, scratch: Path, read_all: ReadAll
) -> None:
    delimiter = "," if kind == "csv" else "\t"
    (scratch / f"a.{kind}").write_bytes(packed([["id", "text"], *map(list, rows)], delimiter))
    found = read_all(scratch / f"a.{kind}")
    assert (found.texts, found.bad) == ([text for _, text in rows], [])


def test_a_template_joins_columns(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf" + packed([["title", "body"], ["T", "B, b"]]))
    assert read_all(tmp_path / "a.csv", template=r"{title}\n{body}").texts == ["T\nB, b"]


def test_rows_that_are_none_are_counted_and_the_others_read(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,one\n2\n3,"a"b\n\n4,\xff\n5,two\n6,"open\n7,lost\n')
    found = read_all(tmp_path / "a.csv")
    assert found.texts == ["one", "two"]
    assert [(one.reason, one.where.rpartition(" ")[2]) for one in found.bad] == [
        ("invalid_csv", "2"),
        ("invalid_csv", "3"),
        ("invalid_utf8", "5"),
        ("invalid_csv", "7"),
    ]


def test_a_file_without_that_header_says_what_its_first_line_names(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.csv").write_text("id,body\n1,one\n")
    with pytest.raises(BadInputError, match="no column 'text': its first line names id, body"):
        read_all(tmp_path / "a.csv")


def test_a_damaged_archive_gives_the_rows_before_the_damage(tmp_path: Path, read_all: ReadAll) -> None:
    data = gzip.compress(packed([["text"], *([f"row {n}"] for n in range(20_000))]))
    (tmp_path / "a.csv.gz").write_bytes(data[: len(data) // 2])
    found = read_all(tmp_path / "a.csv.gz")
    assert found.texts[:2] == ["row 0", "row 1"]
    assert len(found.texts) > 5000
    assert [one.reason for one in found.bad] == ["truncated"]


def test_a_field_over_the_limit_is_told(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.csv").write_bytes(packed([["text"], ["a"], ["b\n" * 3000], ["c"]]))
    found = read_all(tmp_path / "a.csv", max_document_bytes=1000)
    assert found.texts[0] == "a"
    assert found.bad[0].reason == "invalid_csv"
    assert "limit" in found.bad[0].detail


def test_an_empty_file_holds_nothing(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.csv").write_bytes(b"")
    assert read_all(tmp_path / "a.csv").texts == []
