"""Stretches of files to the card: by threads in C, and by their Python twin."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest
import torch
from xxhash import xxh3_64_intdigest

from stoker.load.device.pump import TorchRing
from stoker.load.device.streams import Device
from stoker.load.pool import open_pool
from stoker.load.reading.chunks import Run

STRETCHES = [(0, 9_000_001), (1, 2), (4095, 4097), (8191, 5_000_000), (8_999_999, 9_000_001)]


@pytest.fixture
def device():
    return Device("cuda")


@pytest.fixture(params=["pool", "twin"])
def read(request, device):
    """A function that reads stretches of an open file to a tensor at the same places."""
    if request.param == "twin":
        ring = TorchRing(device, 8192)

        def with_ring(file, stretches, target):
            for start, stop in stretches:
                ring.pump(file, start, target[start:stop])

        yield with_ring
        return
    pool = pool_for(device, threads=3)
    assert pool, "the extension stoker.load._pump is not built"

    def with_pool(file, stretches, target):
        jobs = [
            pool.submit([run(file, start, stop)], target=target.data_ptr(), after=device.mark())
            for start, stop in stretches
        ]
        for job in jobs:
            job.finish()
            job.wait(torch.cuda.current_stream())

    yield with_pool
    pool.close()
    pool.close()


def pool_for(device, *, threads):
    return open_pool(
        threads=threads,
        block_bytes=4 << 20,
        device=device.torch_device.index,
        stream=device.copy_stream,
    )


def run(file, start, stop, digests=None, block_bytes=8192, file_bytes=0):
    verify = digests is not None
    return Run(
        file=file,
        start=start,
        stop=stop,
        at=start,
        digests=digests if verify else np.empty(0, np.uint64),
        doubted=start // block_bytes * block_bytes if verify else 0,
        trusted=stop if verify else 0,
        block_bytes=block_bytes,
        file_bytes=file_bytes,
    )


@pytest.fixture
def file(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, STRETCHES[0][1], dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    return path, data


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_any_stretch_arrives(read, file, flags):
    path, data = file
    handle = os.open(path, os.O_RDONLY | flags)
    for start, stop in STRETCHES:
        target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
        read(handle, [(start, stop)], target)
        found = target.cpu().numpy()
        assert np.array_equal(found[start:stop], data[start:stop])
        assert not found[:start].any()
        assert not found[stop:].any()
    os.close(handle)


def test_many_stretches_at_once_arrive(read, file):
    path, data = file
    handle = os.open(path, os.O_RDONLY)
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    edges = np.linspace(0, len(data), 60).astype(int).tolist()
    read(handle, list(itertools.pairwise(edges)), target)
    assert np.array_equal(target.cpu().numpy(), data)
    os.close(handle)


def test_a_file_that_is_too_short_is_told(read, file):
    path, data = file
    handle = os.open(path, os.O_RDONLY)
    target = torch.empty(len(data) + 10, dtype=torch.uint8, device="cuda")
    with pytest.raises(EOFError):
        read(handle, [(len(data) - 10, len(data) + 10)], target)
    os.close(handle)


def test_a_file_that_cannot_be_read_is_told(read, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        read(handle, [(0, 20)], torch.empty(20, dtype=torch.uint8, device="cuda"))
    os.close(handle)


def test_a_copy_waits_for_those_who_still_read_its_target(device, file):
    path, data = file
    handle, pool = os.open(path, os.O_RDONLY), pool_for(device, threads=1)
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    torch.cuda._sleep(50_000_000)
    before = target.clone()
    job = pool.submit([run(handle, 0, len(data))], target=target.data_ptr(), after=device.mark())
    job.finish()
    job.wait(torch.cuda.current_stream())
    assert not before.any()
    assert np.array_equal(target.cpu().numpy(), data)
    pool.close()
    os.close(handle)


def test_what_has_not_begun_is_cancelled_when_a_pool_closes(device, file):
    path, data = file
    handle, pool = os.open(path, os.O_RDONLY), pool_for(device, threads=1)
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    stretch, address = [run(handle, 0, len(data))], target.data_ptr()
    jobs = [pool.submit(stretch, target=address, after=None) for _ in range(200)]
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        jobs[-1].finish()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(stretch, target=address, after=None).finish()
    os.close(handle)


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
@pytest.mark.parametrize("block_bytes", [4096, 8192, 1 << 20, 4 << 20])
def test_blocks_are_verified_on_their_way(device, file, flags, block_bytes):
    path, data = file
    handle, pool = os.open(path, os.O_RDONLY | flags), pool_for(device, threads=3)
    assert pool.verifies(block_bytes)
    digests = digests_of(data, block_bytes)
    for start, stop in STRETCHES:
        target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
        wanted = run(handle, start, stop, digests, block_bytes, len(data))
        job = pool.submit([wanted], target=target.data_ptr(), after=None)
        job.finish()
        job.wait(torch.cuda.current_stream())
        found = target.cpu().numpy()
        assert np.array_equal(found[start:stop], data[start:stop])
        assert not found[:start].any()
        assert not found[stop:].any()
    pool.close()
    os.close(handle)


@pytest.mark.parametrize("at", [0, 4_194_303, 4_194_304, 9_000_000])
def test_a_flipped_byte_is_found_before_anything_of_its_block_is_handed_on(device, file, at):
    path, data = file
    block_bytes = 1 << 20
    digests = digests_of(data, block_bytes)
    with path.open("r+b") as damaged:
        damaged.seek(at)
        damaged.write(bytes([data[at] ^ 1]))
    handle, pool = os.open(path, os.O_RDONLY), pool_for(device, threads=1)
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    wanted = run(handle, 0, len(data), digests, block_bytes, len(data))
    with pytest.raises(ValueError, match="digest"):
        pool.submit([wanted], target=target.data_ptr(), after=None).finish()
    torch.cuda.synchronize()
    begin = at // block_bytes * block_bytes
    assert not target[begin : begin + block_bytes].any()
    pool.close()
    os.close(handle)


def digests_of(data, block_bytes):
    starts = range(0, len(data), block_bytes)
    return np.array([xxh3_64_intdigest(data[at : at + block_bytes].data) for at in starts], np.uint64)
