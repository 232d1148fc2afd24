"""Stretches of files to the card, through C and through its Python twin."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

from stoker.load.device import Device
from stoker.load.pump import NativeRing, TorchRing, make_ring

STEP = 8192


@pytest.fixture(params=["native", "twin"])
def ring(request):
    device = Device("cuda")
    if request.param == "twin":
        return TorchRing(device, STEP)
    ring = make_ring(device, STEP)
    assert isinstance(ring, NativeRing), "the extension stoker.load._pump is not built"
    return ring


@pytest.fixture
def file(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 300_001, dtype=np.uint8)
    path = tmp_path / "file"
    path.write_bytes(data.tobytes())
    return path, data


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
def test_any_stretch_arrives(ring, file, flags):
    path, data = file
    handle = os.open(path, os.O_RDONLY | flags)
    target = torch.zeros(len(data), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for start, stop in [(0, len(data)), (1, 2), (4095, 4097), (8191, 90_000), (299_999, 300_001)]:
        ring.pump(handle, start, target[start:stop])
        torch.cuda.synchronize()
        assert np.array_equal(target[start:stop].cpu().numpy(), data[start:stop])
    os.close(handle)


def test_a_filled_stage_is_copied_in_part(ring):
    target = torch.zeros(100, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    for number in range(5):
        ring.take()[:200] = number
        ring.push(50, 20, target[number * 20 : number * 20 + 20])
    torch.cuda.synchronize()
    assert target.cpu().tolist() == [number for number in range(5) for _ in range(20)]


def test_a_file_that_is_too_short_is_told(ring, file):
    path, data = file
    handle = os.open(path, os.O_RDONLY)
    with pytest.raises(EOFError):
        ring.pump(handle, len(data) - 10, torch.empty(20, dtype=torch.uint8, device="cuda"))
    os.close(handle)


def test_a_file_that_cannot_be_read_is_told(ring, tmp_path):
    handle = os.open(tmp_path, os.O_RDONLY)
    with pytest.raises(IsADirectoryError):
        ring.pump(handle, 0, torch.empty(20, dtype=torch.uint8, device="cuda"))
    os.close(handle)
