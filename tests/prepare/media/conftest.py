"""Folders of made photographs, and a way to prepare them in this process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from made_photos import photo, samples_of

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def classes(tmp_path: Path) -> Path:
    """Three classes of twelve photographs each."""
    for number, name in enumerate(("cat", "dog", "éel 1")):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for one in range(12):
            photo(number * 100 + one).save(folder / f"{one:03d}.jpg")
    return tmp_path / "photos"


@pytest.fixture
def take(make: Any, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Prepare media in this process, without a tokenizer, and read its samples."""

    def run(*sources: Path | str, **given: Any) -> list[dict[str, Any]]:
        out = given.setdefault("out", tmp_path / "out")
        make(*sources, **{"tokenizer": "", **given})
        return samples_of(Path(out))

    return run
