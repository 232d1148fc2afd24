"""Where `stoker report` writes unless told."""

from __future__ import annotations

from pathlib import Path

import pytest

from stoker.cli.report import page_beside


@pytest.mark.parametrize("name", ["lr0.1", "lr0.2", "train"])
def test_runs_have_pages_of_their_own(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    assert page_beside(tmp_path / name) == tmp_path / f"{name}.html"


def test_this_folder_has_a_name_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run" / "n0").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run")
    assert page_beside(Path()) == tmp_path / "run.html"
    assert page_beside(Path("n0/..")) == tmp_path / "run.html"


def test_a_recording_lends_its_page_the_name_without_the_suffix(tmp_path: Path) -> None:
    recording = tmp_path / "lr0.1.jsonl"
    recording.touch()
    assert page_beside(recording) == tmp_path / "lr0.1.html"
