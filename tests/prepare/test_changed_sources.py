"""Sources that change while a run reads them: what the plan did not see is never taken for the data."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING, Any

import pytest

from stoker.errors import TaskError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Change = Callable[[Path], object]


def _cut(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: data.index(b"\n", len(data) // 3) + 1])


def _append(path: Path) -> None:
    with path.open("a") as file:
        file.write('{"text": "late"}\n')


def _replace(path: Path) -> None:
    other = path.with_suffix(".new")
    other.write_bytes(path.read_bytes().replace(b"s", b"z"))
    os.utime(other, ns=(0, path.stat().st_mtime_ns + 1))
    other.rename(path)


@pytest.mark.parametrize("change", [_cut, _append, _replace])
def test_a_source_that_changes_during_a_run_stops_it(
    change: Change, make: Any, inline: Any, corpus: Path, tmp_path: Path
) -> None:
    source = tmp_path / "mine.jsonl"
    shutil.copy(corpus, source)

    class Changing(inline):  # type: ignore[misc]
        def run(self, ledger: Any, stage: str, *rest: Any) -> None:
            if stage == "map":
                change(source)
            super().run(ledger, stage, *rest)

    with pytest.raises(TaskError, match=r"mine.jsonl changed after this run was planned"):
        make(source, launcher=Changing())
    assert make(source).manifest.samples
