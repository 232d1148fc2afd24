"""The wire on mounted filesystems, and what it refuses."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import ChangedError, StorageError, UsageError
from stoker.stage.origins.origin import RemoteFile, resolve
from stoker.stage.wire.transfer import carve, slices
from stoker.stage.wire.wire import SLICE_BYTES, Wire

if TYPE_CHECKING:
    from pathlib import Path

SPAN = st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (pair[0], sum(pair)))


class Memory:
    """A sink that remembers."""

    def __init__(self, count: int) -> None:
        self.data = bytearray(count)

    def write(self, offset: int, data: memoryview) -> None:
        self.data[offset : offset + len(data)] = data


def the_file(path: Path) -> RemoteFile:
    (file,) = resolve(str(path)).files
    return file


def test_a_file_of_a_mounted_filesystem_arrives(tmp_path: Path) -> None:
    data = os.urandom(9 * SLICE_BYTES + 77)
    (tmp_path / "x").write_bytes(data)
    sink = Memory(len(data))
    with Wire() as wire:
        wire.fetch(the_file(tmp_path / "x"), missing=[(0, len(data))], sink=sink)
    assert sink.data == data


def test_small_files_of_a_mounted_filesystem_arrive(tmp_path: Path) -> None:
    files = {f"{number}": os.urandom(number * 10) for number in range(50)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    got: dict[str, bytes] = {}
    with Wire() as wire:
        wire.fetch_small(
            resolve(str(tmp_path)).files,
            deliver=lambda landed: got.update((file.name, bytes(data)) for file, data in landed),
        )
    assert got == files


@pytest.mark.parametrize("change", ["longer", "shorter", "rewritten", "gone"])
def test_a_file_that_changed_since_is_noticed(change: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"0123456789")
    file = the_file(path)
    new = {"longer": b"0123456789+", "shorter": b"012345678", "rewritten": b"9876543210"}
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(new[change])
        os.utime(path, ns=(0, int(file.version) + (change == "rewritten")))
    expected = StorageError if change == "gone" else ChangedError
    with Wire() as wire, pytest.raises(expected, match=str(path)):
        wire.fetch(file, missing=[(0, 10)], sink=Memory(10))


def test_a_file_that_changes_within_the_fetch_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(4 * SLICE_BYTES))

    class Meddler:
        def write(self, offset: int, data: memoryview) -> None:
            os.utime(path, ns=(0, 1))

    file = the_file(path)
    with Wire(connections=1) as wire, pytest.raises(ChangedError, match="written to"):
        wire.fetch(file, missing=[(0, file.bytes)], sink=Meddler())


def test_nothing_missing_asks_nobody() -> None:
    with Wire() as wire:
        wire.fetch(RemoteFile(name="x", url="/nowhere", bytes=5), missing=[], sink=Memory(5))
        wire.fetch_small([], deliver=lambda landed: None)


def test_a_closed_wire_says_so(tmp_path: Path) -> None:
    wire = Wire()
    wire.close()
    wire.close()
    with pytest.raises(UsageError, match="closed"):
        wire.fetch(RemoteFile(name="x", url="/x", bytes=5), missing=[(0, 5)], sink=Memory(5))


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"12345")
    file = the_file(tmp_path / "x")
    with Wire() as wire:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                wire.fetch(file, missing=[(0, 5)], sink=Memory(5))
            except UsageError as error:
                os.write(write, error.message.encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with os.fdopen(read) as said:
            assert "before the process was forked" in said.read()


def test_an_interrupted_fetch_leaves_the_sink_alone(tmp_path: Path) -> None:
    """What `on_bytes` raises stands for what a caller's own code does at any moment."""
    (tmp_path / "x").write_bytes(bytes(8 * SLICE_BYTES))
    file, written = the_file(tmp_path / "x"), []

    class Counting:
        def write(self, offset: int, data: memoryview) -> None:
            written.append(threading.current_thread().name)

    def stop(count: int) -> None:
        raise KeyboardInterrupt

    with Wire() as wire:
        with pytest.raises(KeyboardInterrupt):
            wire.fetch(file, missing=[(0, file.bytes)], sink=Counting(), on_bytes=stop)
        count = len(written)
    assert len(written) == count


@given(start=st.integers(0, 1 << 24), length=st.integers(0, 1 << 23))
def test_slices_cover_a_run_and_cross_no_boundary(start: int, length: int) -> None:
    found = list(slices(start, start + length))
    assert [a for a, _ in found[1:]] == [b for _, b in found[:-1]]
    assert sum(b - a for a, b in found) == length
    assert all(a // SLICE_BYTES == (b - 1) // SLICE_BYTES for a, b in found)


@given(spans=st.lists(SPAN), start=st.integers(0, 60), length=st.integers(0, 30))
def test_carving_takes_what_lies_within_and_leaves_the_rest(
    spans: list[tuple[int, int]], start: int, length: int
) -> None:
    stop = start + length
    inside, outside = carve(spans, start, stop)
    points = sorted(at for a, b in spans for at in range(a, b))
    within = sorted(at for a, b in inside for at in range(a, b))
    without = sorted(at for a, b in outside for at in range(a, b))
    assert within == [at for at in points if start <= at < stop]
    assert without == [at for at in points if not start <= at < stop]


@pytest.mark.parametrize("allowed", [0, 1])
def test_as_many_lanes_work_as_a_container_allows_threads(
    allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, start, started = os.urandom(40 * SLICE_BYTES), threading.Thread.start, []

    def limited(self: threading.Thread) -> None:
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(self)
        start(self)

    (tmp_path / "x").write_bytes(data)
    sink = Memory(len(data))
    monkeypatch.setattr(threading.Thread, "start", limited)
    with Wire() as wire:
        if allowed:
            wire.fetch(the_file(tmp_path / "x"), missing=[(0, len(data))], sink=sink)
            assert sink.data == data
        else:
            with pytest.raises(RuntimeError, match="new thread"):
                wire.fetch(the_file(tmp_path / "x"), missing=[(0, len(data))], sink=sink)
