"""The chunks in use: which make room, and who may write where."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from stoker.load.options import LoaderOptions
from stoker.load.ordering.blend import dealing_of
from stoker.load.ordering.cut import Cut
from stoker.load.parts import make_parts
from stoker.load.reading.chunks import Chunk, ChunkCache, in_threads
from stoker.load.reading.dataset import open_dataset
from stoker.load.store import Store


def chunk(key, slot):
    return Chunk(slot=slot, data=np.array(key), pieces=(), damaged=())


def keys(*numbers):
    return [(0, number, number + 1) for number in numbers]


def test_the_least_recently_used_chunk_makes_room():
    cache = ChunkCache(chunk, slots=2)
    cache.hold(keys(1))
    cache.hold(keys(2))
    cache.hold(keys(1))
    cache.hold(keys(3))
    assert cache.samples_read == 3
    cache.hold(keys(1))
    assert cache.samples_read == 3
    cache.hold(keys(2))
    assert cache.samples_read == 4


def test_reading_ahead_never_takes_what_is_needed_now():
    cache = ChunkCache(chunk, slots=2)
    cache.hold(keys(1, 2))
    cache.prefetch(keys(3), keep=set(keys(1, 2)))
    assert cache.samples_read == 2


def test_a_cache_that_need_hold_less_gives_up_what_was_used_longest_ago():
    cache = ChunkCache(chunk, slots=2)
    cache.resize(4)
    cache.hold(keys(1, 2, 3, 4))
    assert {one.slot for one in cache.hold(keys(1, 2, 3, 4))} == {0, 1, 2, 3}
    cache.resize(1)
    assert cache.slots == 2  # as few as at the beginning, never fewer
    cache.hold(keys(5))
    cache.hold(keys(4))
    assert cache.samples_read == 5
    cache.hold(keys(3))
    assert cache.samples_read == 6
    cache.resize(3)
    assert len({one.slot for one in cache.hold(keys(3, 4, 6))}) == 3


def test_a_failed_read_is_raised_and_can_be_tried_again():
    failing = []

    def load(key, slot):
        if failing.pop():
            raise OSError("disk")
        return chunk(key, slot)

    with ThreadPoolExecutor(1) as pool:
        for threads in (None, pool):
            failing[:] = [False, True]
            cache = ChunkCache(in_threads(load, threads), slots=1)
            with pytest.raises(OSError, match="disk"):
                cache.hold(keys(1))
            assert cache.hold(keys(1))[0].slot == 0


def test_what_is_being_read_when_the_cache_grows_is_waited_for(corpus):
    options = LoaderOptions("corpus", batch_size=4, seq_len=32, chunk_bytes=256)
    dataset = open_dataset(corpus, files=None, engine="pread", on_corrupt="raise")
    parts = make_parts([dataset], options, cut=Cut(lanes=2), dealing=dealing_of((1.0,)))
    with ThreadPoolExecutor(1) as threads:
        store = Store(parts, batch_rows=4, threads=threads)
        small, held_up = store.cache, threading.Event()
        threads.submit(held_up.wait)
        small.prefetch([(0, 0, 4)], keep=set())
        growing = threading.Thread(target=store.for_keys, args=(small.slots + 1,))
        growing.start()
        assert store.cache is small
        held_up.set()
        growing.join()
    assert store.cache is not small
    dataset.reader.close()
