"""The chunks in use: which make room, and who may write where."""

from __future__ import annotations

from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest

from stoker.load.build import Store, make_parts
from stoker.load.options import LoaderOptions
from stoker.ordering.order import Cut
from stoker.reading.chunks import Chunk, ChunkCache, in_threads
from stoker.reading.dataset import open_dataset


class Later(Executor):
    """Does what it is asked when told to."""

    def __init__(self):
        self.asked = []

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        self.asked.append((future, lambda: fn(*args, **kwargs)))
        return future

    def work(self, number=0):
        future, call = self.asked.pop(number)
        future.set_result(call())


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
    assert cache.loads == 3
    cache.hold(keys(1))
    assert cache.loads == 3
    cache.hold(keys(2))
    assert cache.loads == 4


def test_reading_ahead_never_takes_what_is_needed_now():
    cache = ChunkCache(chunk, slots=2)
    cache.hold(keys(1, 2))
    cache.prefetch(keys(3), keep=set(keys(1, 2)))
    assert cache.loads == 2


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


def test_a_read_asked_for_before_the_cache_grew_does_not_write_into_the_new_arena(corpus):
    options = LoaderOptions(batch_size=4, seq_len=32, chunk_bytes=256)
    dataset = open_dataset(corpus, files=None, engine="pread", on_corrupt="raise")
    parts = make_parts([dataset], options, weights=(1.0,), cut=Cut(lanes=2))
    later = Later()
    store = Store(parts, batch_rows=4, threads=later)
    store.cache.prefetch([(0, 0, 4)], keep=set())
    grown = store.for_keys(store.cache.slots + 1)
    grown.prefetch([(0, 8, 12)], keep=set())
    later.work(1)
    before = store.arena.slot(0).copy()
    later.work(0)
    assert (store.arena.slot(0) == before).all()
    dataset.reader.close()
