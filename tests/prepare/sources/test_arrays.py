"""JSON arrays and records over many lines are streamed; damage is told, and memory is bounded."""

from __future__ import annotations

import gzip
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.prepare.sources.arrays import Unfolded

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    ReadAll = Callable[..., Any]

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(st.sampled_from('ab"\\[]{},:\n\u00e4\u2028'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


class Trickle(io.BytesIO):
    """Gives at most so many bytes a read."""

    def __init__(self, data: bytes, step: int) -> None:
        super().__init__(data)
        self._step = step

    def readinto1(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[: self._step])


@given(
    st.lists(values, max_size=6),
    st.sampled_from([None, 0, 2]),
    st.booleans(),
    st.integers(min_value=1, max_value=40),
)
def test_each_element_of_an_array_becomes_a_line(
    records: list[Any], indent: int | None, ascii_only: bool, step: int
) -> None:
    data = json.dumps(records, indent=indent, ensure_ascii=ascii_only).encode()
    read = io.BufferedReader(Unfolded(Trickle(data, step))).read()
    assert len(read) == len(data)
    assert [json.loads(line) for line in read.split(b"\n") if line.strip()] == records


@given(
    st.lists(st.dictionaries(st.text(max_size=4), values, max_size=3), min_size=1, max_size=5),
    st.integers(1, 40),
)
def test_records_printed_over_many_lines_become_a_line_each(records: list[Any], step: int) -> None:
    data = "\n".join(json.dumps(one, indent=1) for one in records).encode()
    read = io.BufferedReader(Unfolded(Trickle(data, step))).read()
    assert [json.loads(line) for line in read.split(b"\n") if line.strip()] == records


@pytest.mark.parametrize("indent", [None, 4])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_array_is_read_record_by_record(
    indent: int | None, pack: Callable[[bytes], bytes], tmp_path: Path, read_all: ReadAll
) -> None:
    records = [{"text": f"{number}, [{{\n\\" * 50, "n": [number]} for number in range(500)]
    path = tmp_path / ("a.json" if pack is bytes else "a.json.gz")
    path.write_bytes(pack(b" \n" + json.dumps(records, indent=indent).encode() + b"\n"))
    found = read_all(path, split_bytes=1000)
    assert (found.texts, found.bad, found.pieces) == ([one["text"] for one in records], [], 1)
    assert found.places == sorted(found.places)


def test_lines_in_a_file_called_json_are_still_cut_by_ranges(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.json").write_text("".join(json.dumps({"text": f"t{n}"}) + "\n" for n in range(200)))
    found = read_all(tmp_path / "a.json", split_bytes=500)
    assert found.texts == [f"t{n}" for n in range(200)]
    assert found.pieces > 1


def test_one_record_over_many_lines_is_a_document(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"text": "all of it"}, indent=2))
    assert read_all(tmp_path / "a.json").texts == ["all of it"]


def test_a_bad_record_of_an_array_costs_itself_only(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.json").write_text('[{"text": "one"}, {"text": oops}, 7, {"no": 1}, {"text": "two"},]')
    found = read_all(tmp_path / "a.json")
    assert found.texts == ["one", "two"]
    assert [one.reason for one in found.bad] == ["invalid_json", "not_text", "missing_field"]


def test_an_array_that_is_cut_short_is_told(tmp_path: Path, read_all: ReadAll) -> None:
    data = json.dumps([{"text": "one"}, {"text": "two"}, {"text": "three"}])
    (tmp_path / "a.json").write_text(data[:-5])
    found = read_all(tmp_path / "a.json")
    assert found.texts == ["one", "two"]
    assert [one.reason for one in found.bad] == ["truncated"]


def test_a_record_over_the_limit_is_passed_over(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"text": "a"}, {"text": "b" * 9000}, {"text": "c"}]))
    found = read_all(tmp_path / "a.json", max_document_bytes=1000)
    assert found.texts == ["a", "c"]
    assert [one.reason for one in found.bad] == ["too_long"]


def test_an_empty_array_holds_nothing(tmp_path: Path, read_all: ReadAll) -> None:
    (tmp_path / "a.json").write_text("[]\n")
    found = read_all(tmp_path / "a.json")
    assert (found.texts, found.bad) == ([], [])
