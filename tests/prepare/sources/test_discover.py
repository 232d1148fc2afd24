"""From names to sources: files, folders, globs, each once and in order."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import BadInputError, UsageError
from stoker.prepare.sources.discover import check_reading, cut, discover
from stoker.prepare.sources.documents import Source
from stoker.storage import open_store


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.txt", "sub/c.jsonl.gz", "sub/deep/d.txt", "README", ".hidden.txt", "x.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    return tmp_path


def names(found: list[Source], root: Path) -> list[str]:
    return [Path(source.url).relative_to(root).as_posix() for source in found]


def test_a_folder_gives_every_readable_file_below_it(tree: Path) -> None:
    assert names(discover([str(tree)]), tree) == ["a.txt", "b.jsonl", "sub/c.jsonl.gz", "sub/deep/d.txt"]


def test_a_glob_gives_what_it_matches(tree: Path) -> None:
    assert names(discover([f"{tree}/**/*.txt"]), tree) == ["a.txt", "sub/deep/d.txt"]


@pytest.mark.parametrize(
    "pattern", ["*.txt", "**/*.txt", "*/*/d.*", "**/deep/*", "s*/**/d.txt", "?.[jt]*", "*/c*"]
)
def test_a_glob_gives_the_same_in_a_store_as_in_a_folder(pattern: str, tree: Path) -> None:
    store = open_store(f"memory://{tree.name}/data")
    for path in ("b.jsonl", "a.txt", "sub/c.jsonl.gz", "sub/deep/d.txt"):
        store.write(path, b"x")
    here = names(discover([f"{tree}/{pattern}"]), tree)
    there = [source.url.removeprefix(f"{store.url}/") for source in discover([f"{store.url}/{pattern}"])]
    assert there == here


def test_names_keep_their_order(tree: Path) -> None:
    assert names(discover([f"{tree}/b.jsonl", f"{tree}/a.txt"]), tree) == ["b.jsonl", "a.txt"]


def test_a_file_named_twice_is_read_once(tree: Path) -> None:
    assert names(discover([f"{tree}/a.txt", str(tree)]), tree).count("a.txt") == 1


def test_a_file_url_is_a_path(tree: Path) -> None:
    assert len(discover([(tree / "a.txt").as_uri()])) == 1


def test_a_name_that_is_not_there_is_refused(tree: Path) -> None:
    with pytest.raises(BadInputError, match=r"gone\.txt does not exist"):
        discover([f"{tree}/gone.txt"])


@pytest.mark.parametrize("name", ["*.parquet", "empty"])
def test_a_name_that_holds_nothing_is_refused(name: str, tree: Path) -> None:
    (tree / "empty").mkdir()
    with pytest.raises(BadInputError, match="holds nothing to read"):
        discover([f"{tree}/{name}"])


def test_a_file_of_unknown_kind_is_refused_if_named(tree: Path) -> None:
    with pytest.raises(BadInputError, match="cannot tell what kind of file"):
        discover([f"{tree}/x.png"])


def test_what_is_left_out_of_a_folder_is_told(tree: Path) -> None:
    told: list[str] = []
    discover([str(tree)], say=told.append)
    assert told == [f"{tree}: 2 files of no known kind left out (.png, README)"]


def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "A.JSONL.GZ").write_bytes(b"x")
    (found,) = discover([str(tmp_path)])
    assert (found.kind, found.compression) == ("jsonl", "gz")


def test_a_linked_folder_is_part_of_the_folder_it_is_linked_into(tree: Path) -> None:
    (tree / "raw").mkdir()
    (tree / "raw" / "more").symlink_to(tree / "sub")
    assert names(discover([f"{tree}/raw"]), tree) == ["raw/more/c.jsonl.gz", "raw/more/deep/d.txt"]


def test_links_that_lead_around_in_a_circle_are_followed_once(tree: Path) -> None:
    (tree / "sub" / "up").symlink_to(tree)
    assert len(discover([f"{tree}/sub"])) == 4


def test_hidden_folders_hold_no_sources(tree: Path) -> None:
    (tree / ".ipynb_checkpoints").mkdir()
    (tree / ".ipynb_checkpoints" / "a-checkpoint.txt").write_bytes(b"x")
    assert len(discover([str(tree)])) == 4


def test_a_hidden_file_is_read_if_named(tree: Path) -> None:
    assert names(discover([f"{tree}/.hidden.txt"]), tree) == [".hidden.txt"]


@pytest.mark.parametrize("name", ["", "/"])
def test_a_folder_is_not_source_and_output_at_once(name: str, tree: Path) -> None:
    with pytest.raises(UsageError, match="is a source and --out at once"):
        discover([f"{tree}{name}"], out=str(tree))


def test_lines_without_a_text_file_is_wrong_usage(tree: Path) -> None:
    with pytest.raises(UsageError, match="--lines"):
        check_reading(discover([f"{tree}/b.jsonl"]), lines=True)


sources = st.builds(
    lambda size, units: Source(url="x", kind="jsonl", bytes=size, units=max(1, min(units, size))),
    st.integers(0, 1000),
    st.integers(1, 1000),
)


@given(st.lists(sources, max_size=10), st.integers(1, 400))
def test_cutting_covers_every_unit_once_and_in_order(found: list[Source], split_bytes: int) -> None:
    pieces = [piece for split in cut(found, split_bytes=split_bytes) for piece in split]
    covered = [(piece.source, unit) for piece in pieces for unit in range(piece.start, piece.stop)]
    assert covered == [(number, unit) for number, source in enumerate(found) for unit in range(source.units)]


@given(st.lists(sources, max_size=10), st.integers(1, 400))
def test_no_split_is_empty(found: list[Source], split_bytes: int) -> None:
    assert all(cut(found, split_bytes=split_bytes))
