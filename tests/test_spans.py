"""Spans: nothing unless recording; then a line each, which survives a torn end."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from stoker.spans import emit, read_spans, recording, span

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_is_written_unless_recording(tmp_path: Path) -> None:
    with span("load"):
        emit("copy", start=0.0, end=1.0)
    assert read_spans(tmp_path) == []


def test_a_span_is_read_back(tmp_path: Path) -> None:
    with recording(tmp_path, rank=3):
        emit("copy", start=1.0, end=3.5, step=7, bytes=64)
    (found,) = read_spans(tmp_path)
    assert (found.what, found.rank, found.step, found.bytes, found.seconds) == ("copy", 3, 7, 64, 2.5)


def test_a_block_that_raises_is_recorded_all_the_same(tmp_path: Path) -> None:
    with recording(tmp_path), pytest.raises(RuntimeError), span("load"):
        raise RuntimeError
    assert [found.what for found in read_spans(tmp_path)] == ["load"]


def test_spans_come_in_the_order_of_their_start(tmp_path: Path) -> None:
    with recording(tmp_path):
        emit("second", start=2.0, end=9.0)
        emit("first", start=1.0, end=3.0)
    assert [found.what for found in read_spans(tmp_path)] == ["first", "second"]


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    with recording(tmp_path):
        threads = [
            threading.Thread(target=lambda: [emit("x" * 99, start=0, end=1) for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(read_spans(tmp_path)) == 800


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    with recording(tmp_path):
        emit("whole", start=0.0, end=1.0)
    (path,) = tmp_path.iterdir()
    with path.open("a") as file:
        file.write('{"what": "torn", "sta')
    assert [found.what for found in read_spans(tmp_path)] == ["whole"]


def test_recording_ends_with_its_block(tmp_path: Path) -> None:
    with recording(tmp_path):
        pass
    emit("late", start=0.0, end=1.0)
    assert read_spans(tmp_path) == []
