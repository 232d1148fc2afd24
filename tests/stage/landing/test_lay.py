"""Many small files at once: written and moved as one by one, with or without the extension."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from stoker.stage.landing import lay
from stoker.stage.landing.lay import move_files, write_files

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(params=["native", "python"], autouse=True)
def _way(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    skip_or_fail: Callable[[str], None],
) -> None:
    if request.param == "python":
        monkeypatch.setattr(lay, "native", lambda name: None)
    elif lay.native("stage._lay") is None:
        skip_or_fail("the extension was not built: install a C compiler, then `make venv`")


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    handle = os.open(folder, os.O_RDONLY)
    yield handle
    os.close(handle)


def view(data: bytes) -> memoryview:
    return memoryview(bytearray(data))


def test_files_are_written_whole_in_place_of_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "1").write_bytes(b"what was there before and is longer")
    contents = {"1": b"short", "2": b"", "3": b"x" * 1_000_001, "näme 4": b"more"}
    write_files([(f"{tmp_path}/{name}", view(data)) for name, data in contents.items()])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == contents


def test_files_are_moved_over_what_has_their_names(tmp_path: Path) -> None:
    for name in ("a", "b", "new a"):
        (tmp_path / name).write_text(name)
    with opened(tmp_path) as folder:
        move_files(folder, ((f"{tmp_path}/{name}", f"new {name}") for name in ("a", "b")))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"new a": "a", "new b": "b"}


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_files([(f"{tmp_path}/gone/x", view(b"data"))])
    assert caught.value.filename == f"{tmp_path}/gone/x"


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"):
        write_files([(f"{tmp_path}/fits", view(b"x")), ("/dev/full", view(b"does not"))])
    assert (tmp_path / "fits").read_bytes() == b"x"


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError) as caught, opened(tmp_path) as folder:
        move_files(folder, [(f"{tmp_path}/x", "taken")])
    assert (caught.value.filename, caught.value.filename2) == (f"{tmp_path}/x", "taken")


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "x").symlink_to(tmp_path / "outside")
    with pytest.raises(OSError, match="symbolic links"):
        write_files([(f"{tmp_path}/x", view(b"data"))])
    assert (tmp_path / "outside").read_text() == "mine"
