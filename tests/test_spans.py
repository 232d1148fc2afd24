"""Spans: nothing unless recording; then a record each in a ring, which survives the writer's death."""

from __future__ import annotations

import errno
import os
import signal
import threading
from typing import TYPE_CHECKING

import pytest

from recorded_spans import read_spans, recording, spans_of
from stoker import spans
from stoker.spans import Ring, emit, span

if TYPE_CHECKING:
    from pathlib import Path


def test_nothing_is_written_unless_recording(tmp_path: Path) -> None:
    with span("load"):
        emit("copy", start=0.0, end=1.0)
    assert read_spans(tmp_path) == []


def test_a_span_is_read_back(tmp_path: Path) -> None:
    with recording(tmp_path):
        emit("copy", start=1.0, end=3.5, step=7, bytes=64)
    (found,) = read_spans(tmp_path)
    assert (found.what, found.step, found.bytes, found.seconds) == ("copy", 7, 64, 2.5)


def test_a_block_that_raises_is_recorded_all_the_same(tmp_path: Path) -> None:
    with recording(tmp_path), pytest.raises(RuntimeError), span("load"):
        raise RuntimeError
    assert [found.what for found in read_spans(tmp_path)] == ["load"]


def test_spans_come_in_the_order_of_their_start(tmp_path: Path) -> None:
    with recording(tmp_path):
        emit("second", start=2.0, end=9.0)
        emit("first", start=1.0, end=3.0)
    assert [found.what for found in read_spans(tmp_path)] == ["first", "second"]


def test_threads_write_whole_records_and_are_told_apart(tmp_path: Path) -> None:
    with recording(tmp_path):
        threads = [
            threading.Thread(target=lambda: [emit("x" * 99, start=0, end=1) for _ in range(200)])
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        emit("main", start=0, end=1)
    found = read_spans(tmp_path)
    assert len(found) == 801
    assert [one.what for one in found if one.thread == 0] == ["main"]


def test_a_ring_keeps_the_last_records(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "small.ring", capacity=10)
    for number in range(25):
        ring.write("x", number, number + 1, number, 0, 0)
    ring.close()
    assert [one.step for one in spans_of(tmp_path / "small.ring")] == list(range(15, 25))


def test_more_names_than_there_is_room_for_go_by_the_last_one(tmp_path: Path) -> None:
    ring = Ring(tmp_path / "names.ring", capacity=100)
    for number in range(40):
        ring.write(f"{number}" + "x" * 1000, 0, 1, number, 0, 0)
    ring.close()
    assert len({one.what for one in spans_of(tmp_path / "names.ring")}) == 16


def test_a_killed_process_leaves_every_span_it_wrote(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        with recording(tmp_path):
            emit("last words", start=0.0, end=1.0)
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [found.what for found in read_spans(tmp_path)] == ["last words"]


def test_a_ring_for_which_there_is_no_room_is_an_error_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="no space"), recording(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_recording_ends_with_its_block(tmp_path: Path) -> None:
    with recording(tmp_path):
        pass
    emit("late", start=0.0, end=1.0)
    assert read_spans(tmp_path) == []
    assert spans.record_to(None) is None
