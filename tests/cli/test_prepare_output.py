"""What `stoker prepare` prints: true counts, and any text as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from curations import curation_of
from stoker.cli import progress
from stoker.cli.prepared import report_prepared
from stoker.prepare.sources.documents import Reading

if TYPE_CHECKING:
    from pathlib import Path


def test_what_was_dropped_and_what_was_skipped_for_the_same_reason_are_counted_apart(
    make: Any, write_jsonl: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = make(
        write_jsonl(tmp_path / "a.jsonl", ["a" * 2000, "b" * 100, "b" * 101, "kept"]),
        curation=curation_of(max_chars=50),
        reading=Reading(max_document_bytes=1000),
        on_error="skip",
    )
    report_prepared(made, as_json=False)
    printed = capsys.readouterr().out
    assert "dropped  2 documents: too_long" in printed
    assert "skipped  1 document: too_long" in printed


def test_brackets_are_printed_on_a_terminal_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "Console", lambda **given: Console(force_terminal=True, **given))
    with progress.Progress() as bar:
        bar.note("differs on '[INST] shovel [/INST]', is [1, 2]")
    assert "differs on '[INST] shovel [/INST]', is [1, 2]" in capsys.readouterr().err
