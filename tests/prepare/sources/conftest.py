"""Read sources the way a map task does: discover, cut, read piece by piece."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from stoker.prepare.sources.discover import cut, discover
from stoker.prepare.sources.documents import Reading
from stoker.prepare.sources.read import read_piece

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass
class Read:
    """Everything that came out, and from how many pieces."""

    texts: list[str] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    bad: list[Any] = field(default_factory=list)
    pieces: int = 0


def read_all(*names: object, split_bytes: int = 1 << 20, split: str = "train", **reading: Any) -> Read:
    how = Reading(**reading)
    sources = discover(list(map(str, names)), lines=how.lines, split=split)
    found = Read()
    for pieces in cut(sources, split_bytes=split_bytes):
        for piece in pieces:
            found.pieces += 1
            for documents in read_piece(sources[piece.source], piece, how):
                texts = documents.texts
                found.texts += texts if isinstance(texts, list) else texts.strings
                found.places += [(piece.source, place) for place in documents.places]
                found.bad += documents.bad
    return found


@pytest.fixture(scope="session", name="read_all")
def read_all_fixture() -> Callable[..., Read]:
    return read_all


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for property tests, which write many files under one name."""
    return Path(tmp_path_factory.mktemp("scratch"))
