"""The storage workload: every block once, counted and timed, the same in C and in Python."""

from __future__ import annotations

import errno
import os
from collections import Counter
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.bench.drive import Workload, block_order, bucket_of, bucket_s, drive, drive_in_python
from stoker.native import native

BLOCK = 4096


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(64 * BLOCK))
    descriptor = os.open(path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def c_module(skip_or_fail):
    if native("bench._drive") is None:
        skip_or_fail("the C module was not built: make venv on a machine with a compiler")


@pytest.fixture
def needs_ring(c_module, file, skip_or_fail):
    try:
        drive(file, BLOCK, Workload(engine="io_uring", block=BLOCK, repeats=False))
    except OSError as error:
        skip_or_fail(f"io_uring is not allowed here: {error}")


@given(blocks=st.integers(1, 300), seed=st.integers(0, 1 << 40), repeats=st.booleans())
def test_a_drawn_order_has_every_block_once(blocks, seed, repeats):
    work = Workload(random=True, repeats=repeats)
    order = list(islice(block_order(work, blocks, seed), 2 * blocks))
    assert sorted(order[:blocks]) == list(range(blocks))
    assert sorted(order[blocks:]) == (list(range(blocks)) if repeats else [])


@given(st.integers(0, 1 << 40))
def test_a_bucket_holds_its_latency(nanoseconds):
    found = bucket_s(bucket_of(nanoseconds)) * 1e9
    assert abs(found - nanoseconds) <= max(1, nanoseconds / 64)


@pytest.mark.parametrize("random", [False, True])
@pytest.mark.parametrize(
    ("engine", "writes"),
    [("sync", False), ("sync", True), ("io_uring", False), ("io_uring", True), ("mmap", False)],
)
def test_one_pass_moves_the_file_once(file, engine, writes, random, needs_ring):
    work = Workload(
        engine=engine,
        block=BLOCK,
        threads=4,
        depth=3,
        writes=writes,
        random=random,
        repeats=False,
        seconds=30,
    )
    done = drive(file, 64 * BLOCK, work)
    assert (done.calls, done.bytes) == (64, 64 * BLOCK)
    assert sum(done.latencies.values()) == 64
    assert 0 < done.latency_s(0.5) <= done.latency_s(0.99) <= done.seconds * 1.02


@pytest.mark.parametrize("engine", ["sync", "mmap"])
def test_the_twin_in_python_does_the_same_work(file, engine):
    work = Workload(engine=engine, block=BLOCK, threads=4, random=True, repeats=False, seconds=30)
    calls, seconds, _, latencies = drive_in_python(file, 64 * BLOCK, work)
    assert calls == sum(latencies.values()) == 64
    assert seconds > 0


def test_both_write_every_block(tmp_path):
    for name, run in (("c", drive), ("python", drive_in_python)):
        path = tmp_path / name
        path.write_bytes(bytes(16 * BLOCK))
        with path.open("r+b") as opened:
            run(opened.fileno(), 16 * BLOCK, Workload(block=BLOCK, threads=2, writes=True, repeats=False))
        blocks = [path.read_bytes()[at : at + BLOCK] for at in range(0, 16 * BLOCK, BLOCK)]
        assert bytes(BLOCK) not in blocks, name
        assert max(Counter(blocks[0]).values()) < BLOCK // 16, "a disk that compresses would find zeros"


def test_it_goes_on_until_its_time_is_over(file):
    done = drive(file, 64 * BLOCK, Workload(block=BLOCK, seconds=0.05))
    assert done.calls > 64


@pytest.mark.parametrize("run", [drive, drive_in_python])
def test_a_file_that_is_shorter_than_said_is_an_error(file, run):
    with pytest.raises(OSError, match=os.strerror(errno.EIO) + "|a part of a block"):
        run(file, 65 * BLOCK, Workload(block=BLOCK, repeats=False, seconds=30))


@pytest.mark.parametrize("run", [drive, drive_in_python])
def test_a_descriptor_that_may_not_be_written_is_an_error(tmp_path, run):
    path = tmp_path / "file"
    path.write_bytes(bytes(BLOCK))
    with path.open("rb") as opened, pytest.raises(OSError, match="Bad file descriptor"):
        run(opened.fileno(), BLOCK, Workload(block=BLOCK, writes=True))


@pytest.mark.parametrize("change", [{"threads": 65}, {"block": 12}, {"depth": 2000}, {"threads": 0}])
def test_numbers_out_of_range_are_refused(file, change, c_module):
    given = {"block": BLOCK, **change}
    with pytest.raises(ValueError, match="out of range"):
        drive(file, 64 * BLOCK, Workload(**given))


@pytest.mark.parametrize("engine", ["sync", "io_uring"])
def test_filling_buffers_is_no_part_of_a_trial(tmp_path, engine, request):
    """Buffers that took longer to fill than the trial lasts left 0 B/s, on millions of cores."""
    if engine == "io_uring":
        request.getfixturevalue("needs_ring")
    block = 64 << 20
    with open(tmp_path / "sparse", "w+b") as sparse:
        sparse.truncate(block)
        done = drive(sparse.fileno(), block, Workload(engine=engine, block=block, depth=2, seconds=1e-6))
    assert done.calls >= 1
    assert done.bytes_s > 0
    assert done.cpu_s / done.seconds < 2 * (os.cpu_count() or 1)


def test_the_twin_s_buffers_are_no_part_of_a_trial_either(file):
    calls, seconds, _, _ = drive_in_python(file, 64 * BLOCK, Workload(block=BLOCK, threads=8, seconds=1e-3))
    assert calls
    assert seconds > 0
