"""Stretches of the page cache instead of reads; for the driver, which is not here, stands a list of calls."""

from __future__ import annotations

import ctypes
import os

import numpy as np
import pytest

from stoker.load.device import pinned
from stoker.load.device.pinned import EXTENT_BYTES, PageCache, spare_memory
from stoker.load.reading.chunks import Run

SIZE = 2 * EXTENT_BYTES + 12345


class Driver:
    def __init__(self, error=None):
        self.known, self.error = {}, error

    def pin(self, address, size):
        if self.error:
            raise OSError(self.error)
        self.known[address] = size

    def unpin(self, address):
        del self.known[address]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pinned") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.fixture
def handle(path):
    handle = os.open(path, os.O_RDONLY)
    yield handle
    os.close(handle)


def run(file, start, stop, **more):
    fields = {"doubted": 0, "trusted": 0, "block_bytes": 4096, "file_bytes": SIZE, **more}
    return Run(file=file, start=start, stop=stop, at=100, digests=np.empty(0, np.uint64), **fields)


def bytes_of(runs):
    """What a copy from these addresses would bring, laid where it goes."""
    found = bytearray(max(run.at + run.stop - run.start for run in runs) - 100)
    for one in runs:
        length = one.stop - one.start
        found[one.at - 100 : one.at - 100 + length] = ctypes.string_at(one.memory, length)
    return bytes(found)


@pytest.mark.parametrize(
    ("start", "stop"),
    [
        (0, SIZE),
        (5, 6),
        (EXTENT_BYTES - 7, EXTENT_BYTES + 9),
        (EXTENT_BYTES, 2 * EXTENT_BYTES),
        (SIZE - 1, SIZE),
    ],
)
def test_a_run_becomes_stretches_of_memory_that_the_driver_knows(path, handle, start, stop):
    driver = Driver()
    cache = PageCache(driver, room=SIZE)
    runs = cache.located(run(handle, start, stop))
    assert bytes_of(runs) == path.read_bytes()[start:stop]
    for one in runs:
        assert any(
            address <= one.memory and one.memory + one.stop - one.start <= address + size
            for address, size in driver.known.items()
        )
    assert cache.bytes == sum(driver.known.values())
    cache.close()
    cache.close()
    assert not driver.known


def test_an_extent_is_made_known_once(handle):
    driver = Driver()
    cache = PageCache(driver, room=SIZE)
    for start in range(0, 1000, 100):
        cache.located(run(handle, start, start + 100))
    assert len(driver.known) == 1
    cache.close()


def test_what_is_not_verified_yet_is_read(handle):
    doubted = run(handle, 0, 100, trusted=4096)
    assert PageCache(Driver(), room=SIZE).located(doubted) == [doubted]


def test_no_more_is_held_in_memory_than_there_is_room_for(handle):
    cache = PageCache(Driver(), room=EXTENT_BYTES)
    first, second = run(handle, 0, 100), run(handle, EXTENT_BYTES, EXTENT_BYTES + 100)
    assert cache.located(first)[0].memory
    assert cache.located(second) == [second]
    assert cache.located(first)[0].memory


def test_a_driver_that_refuses_is_asked_once(handle):
    cache = PageCache(Driver("error 801"), room=SIZE)
    asked = run(handle, 0, 100)
    assert cache.located(asked) == [asked]
    assert "801" in cache.refused
    cache._pool.error = None
    assert cache.located(asked) == [asked]


def test_a_file_that_was_cut_short_is_left_to_those_who_read_it(tmp_path):
    (tmp_path / "file").write_bytes(bytes(10_000))
    with (tmp_path / "file").open("r+b") as file:
        cache, asked = PageCache(Driver(), room=SIZE), run(file.fileno(), 0, 10_000)
        assert cache.located(asked)[0].memory
        file.truncate(5000)
        assert cache.located(asked) == [asked]
        cache.close()


def test_what_is_not_in_memory_is_read(handle, monkeypatch):
    monkeypatch.setattr(pinned, "_is_in_memory", lambda data: False)
    asked = run(handle, 0, 100)
    assert PageCache(Driver(), room=SIZE).located(asked) == [asked]


def test_pages_that_nobody_has_touched_are_not_in_memory(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.truncate(1 << 20)
        data = pinned._map(file.fileno()).data
        assert not pinned._is_in_memory(data)
        file.write(bytes(1 << 20))
        file.flush()
        assert pinned._is_in_memory(data)


def test_a_part_of_the_free_memory_is_spare():
    assert 0 < spare_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
