"""Emulated accelerators: what they take, how many pass, and real reads of real samples."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.bench.accelerators import (
    PROFILES,
    Profile,
    bench_accelerators,
    emulate,
    largest_passing,
    samples_in,
)
from stoker.bench.direct import Direct
from stoker.errors import StorageError

TINY = Profile(sample_bytes=5000, batch=4, step_s=0.002, in_a_file=16, readers=2)


@given(limit=st.integers(0, 100), most=st.integers(1, 64))
def test_the_largest_number_that_passes_is_found(limit, most):
    tried = []

    def passes(count):
        tried.append(count)
        return count <= limit

    assert largest_passing(passes, most=most) == min(limit, most)
    assert len(tried) == len(set(tried)) <= 14


@pytest.mark.parametrize(
    ("name", "gigabytes"), [("resnet50-h100", 0.2047), ("unet3d-h100", 3.177), ("cosmoflow-h100", 0.808)]
)
def test_a_card_takes_what_mlperf_storage_says(name, gigabytes):
    assert PROFILES[name].bytes_s / 1e9 == pytest.approx(gigabytes, rel=0.001)


@pytest.mark.parametrize("in_a_file", [1, 7])
def test_samples_are_read_whole_past_the_page_cache(tmp_path, in_a_file):
    paths = []
    for number in range(3):
        paths.append(tmp_path / str(number))
        paths[-1].write_bytes(os.urandom(5000 * in_a_file))
    with Direct(paths, sample_bytes=5000, in_a_file=in_a_file) as files, files.buffer() as buffer:
        for sample in range(files.samples):
            files.read(sample, buffer)
            file, number = divmod(sample, in_a_file)
            skipped = number * 5000 % 4096  # the sector it begins in
            assert buffer[skipped : skipped + 5000] == paths[file].read_bytes()[number * 5000 :][:5000]


def test_a_file_that_was_cut_short_is_an_error(tmp_path):
    path = tmp_path / "cut"
    path.write_bytes(bytes(9000))
    with (
        Direct([path], sample_bytes=5000, in_a_file=2) as files,
        files.buffer() as buffer,
        pytest.raises(OSError, match="shorter"),
    ):
        files.read(1, buffer)


def test_cards_that_are_fed_are_at_work(tmp_path):
    with samples_in(tmp_path, TINY, 1 << 20) as files:
        found = emulate(TINY, files, cards=2, seconds=0.2)
    assert found.cards == 2
    assert 0 < found.utilisation <= 1
    assert found.bytes_s > 0
    assert os.listdir(tmp_path) == []


def test_a_disk_that_fails_is_an_error_and_not_a_card_that_waits_for_ever(tmp_path):
    with samples_in(tmp_path, TINY, 1 << 20) as files:
        for path in tmp_path.glob(".stoker-bench-*/*"):
            os.truncate(path, 100)
        with pytest.raises(OSError, match="shorter"):
            emulate(TINY, files, cards=1, seconds=0.2)


def test_a_number_of_cards_passes_or_does_not(tmp_path):
    found = bench_accelerators(tmp_path, "llama3-8b-h100", cards=1, size=8 << 20, seconds=0.05)
    assert found.passed
    assert found.figures[0].value > 0.9
    assert "store_rate" in found.measured


def test_a_disk_without_room_is_left_alone(tmp_path):
    with pytest.raises(StorageError, match="too little room"):
        bench_accelerators(tmp_path, "unet3d-h100", size=1 << 60)
    assert os.listdir(tmp_path) == []
