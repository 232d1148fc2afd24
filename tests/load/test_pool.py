"""Threads in C that read files to the host's memory: in place, verified, or telling what is wrong."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import deque
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from stoker.load.pool import open_pool
from stoker.load.reading.chunks import Run
from stoker.load.reading.engines import PAGE, page_aligned

BLOCK, SIZE = 2 * PAGE, 9_000_001
DATA = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
DIGESTS = np.array([xxh3_64_intdigest(DATA[at : at + BLOCK].data) for at in range(0, SIZE, BLOCK)], np.uint64)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("pool") / "file"
    path.write_bytes(DATA.tobytes())
    return path


@pytest.fixture(scope="module", params=[0, os.O_DIRECT], ids=["pread", "direct"])
def handle(path, request):
    handle = os.open(path, os.O_RDONLY | request.param)
    yield handle
    os.close(handle)


@pytest.fixture(scope="module")
def pool():
    pool = open_pool(threads=3, block_bytes=BLOCK)
    assert pool, "the extension stoker.load._pump is not built"
    yield pool
    pool.close()
    pool.close()


def run(file, start, stop, *, at=0, verify=True, file_bytes=SIZE):
    return Run(
        file=file,
        start=start,
        stop=stop,
        at=at,
        digests=DIGESTS,
        doubted=start // BLOCK * BLOCK if verify else 0,
        trusted=stop if verify else 0,
        block_bytes=BLOCK,
        file_bytes=file_bytes,
    )


@settings(deadline=None, max_examples=60)
@given(
    ends=st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted),
    lead=st.sampled_from(["as in the file", 0, 1, 4095]),
    verify=st.booleans(),
)
def test_any_stretch_arrives_and_nothing_around_it_is_touched(pool, handle, ends, lead, verify):
    start, stop = ends
    memory = page_aligned(SIZE + 2 * PAGE)
    at = start % PAGE if lead == "as in the file" else lead
    pool.submit([run(handle, start, stop, at=at, verify=verify)], target=memory.ctypes.data).finish()
    assert np.array_equal(memory[at : at + stop - start], DATA[start:stop])
    assert not memory[:at].any()
    assert not memory[at + stop - start :].any()


def test_a_chunk_of_several_pieces_and_many_chunks_at_once_arrive(pool, handle):
    memory = page_aligned(SIZE)
    edges = np.linspace(0, SIZE, 61).astype(int).tolist()
    pieces = [run(handle, start, stop, at=start) for start, stop in itertools.pairwise(edges)]
    jobs = [pool.submit(pieces[n : n + 3], target=memory.ctypes.data) for n in range(0, len(pieces), 3)]
    for job in jobs:
        job.finish()
    assert np.array_equal(memory, DATA)


def test_jobs_that_come_whenever_to_however_many_threads_are_all_done(handle):
    """No thread sleeps on while there is work: each that is woken wakes the next."""
    pool, memory, draw = open_pool(threads=6, block_bytes=BLOCK), page_aligned(SIZE), random.Random(7)
    jobs = deque()
    for _ in range(3_000):
        if draw.random() < 0.05:
            pool.resize(draw.randint(1, 6))
        if draw.random() < 0.1:
            time.sleep(draw.random() / 2_000)  # so that some have gone to sleep, and some have not
        start = draw.randrange(SIZE - 2 * BLOCK)
        stretches = [run(handle, start, start + BLOCK, at=start)] * draw.choice([0, 1, 1, 1, 3])
        jobs.append(pool.submit(stretches, target=memory.ctypes.data))
        while len(jobs) > draw.randint(0, 12):
            jobs.popleft().finish()
    pool.close()
    for job in jobs:
        with suppress(RuntimeError):  # it was cancelled
            job.finish()


def test_one_thread_that_is_left_does_all_the_work(pool, handle):
    memory = page_aligned(SIZE)
    pool.resize(1)
    pool.submit([run(handle, 0, SIZE)], target=memory.ctypes.data).finish()
    pool.resize(3)
    assert np.array_equal(memory, DATA)


@pytest.mark.parametrize("at", [0, BLOCK - 1, BLOCK, SIZE - 1])
def test_a_flipped_byte_is_found(pool, tmp_path, at):
    damaged = DATA.copy()
    damaged[at] ^= 1
    (tmp_path / "damaged").write_bytes(damaged.tobytes())
    memory = page_aligned(SIZE)
    with (tmp_path / "damaged").open("rb") as file, pytest.raises(ValueError, match="digest"):
        pool.submit([run(file.fileno(), 0, SIZE)], target=memory.ctypes.data).finish()


@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_is_too_short_is_told(pool, handle, verify):
    memory = page_aligned(SIZE + PAGE)
    beyond = run(handle, SIZE - 10, SIZE + 10, verify=verify)
    with pytest.raises(EOFError):
        pool.submit([beyond], target=memory.ctypes.data).finish()


def test_a_file_that_cannot_be_read_is_told(pool, tmp_path):
    folder, memory = os.open(tmp_path, os.O_RDONLY), page_aligned(20)
    with pytest.raises(IsADirectoryError):
        pool.submit([run(folder, 0, 20)], target=memory.ctypes.data).finish()
    os.close(folder)


def test_what_has_not_begun_is_cancelled_when_a_pool_closes(handle):
    pool, memory = open_pool(threads=1, block_bytes=BLOCK), page_aligned(SIZE)
    jobs = [pool.submit([run(handle, 0, SIZE)], target=memory.ctypes.data) for _ in range(200)]
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        jobs[-1].finish()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit([run(handle, 0, SIZE)], target=memory.ctypes.data).finish()
