"""Collective bandwidth: nccl-tests' definitions on known times, and real ranks over gloo."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig

import pytest

from stoker.bench.collective import (
    OPERATIONS,
    Timed,
    bench_here,
    bus_factor,
    parse_sizes,
    read_answer,
    report,
    usual_sizes,
)
from stoker.errors import StokerError, UsageError


@pytest.mark.parametrize(
    ("operation", "ranks", "bus"),
    [  # 1 GB in 10 ms: algorithm bandwidth 100 GB/s, times the factors of nccl-tests' PERFORMANCE.md
        ("all_reduce", 2, 100e9),
        ("all_reduce", 8, 175e9),
        ("all_gather", 8, 87.5e9),
        ("reduce_scatter", 8, 87.5e9),
        ("all_to_all", 4, 75e9),
        ("broadcast", 8, 100e9),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation, ranks, bus):
    timed = Timed(operation=operation, bytes=10**9, seconds=0.01, ranks=ranks)
    assert timed.algorithm_bytes_s == pytest.approx(100e9)
    assert timed.bus_bytes_s == pytest.approx(bus)


def test_one_rank_moves_nothing_over_its_link():
    assert bus_factor("all_reduce", 1) == bus_factor("all_gather", 1) == 0


def test_sizes_go_from_the_least_to_the_most():
    assert usual_sizes(8, 4096) == [8, 64, 512, 4096]
    assert usual_sizes(8, 1000) == [8, 64, 512, 1000]
    assert parse_sizes("8B-1KiB") == [8, 64, 512, 1024]
    assert parse_sizes("4KiB,1MiB") == [4096, 1 << 20]


@pytest.mark.parametrize("text", ["1MiB-8B", "1B-8B", "many", "8B-"])
def test_sizes_that_cannot_be_are_refused(text):
    with pytest.raises(UsageError):
        parse_sizes(text)


def test_the_advice_names_the_size_at_which_bandwidth_begins():
    timed = [
        Timed(operation="all_reduce", bytes=size, seconds=1e-4 + size / 1e9, ranks=2)
        for size in (8, 10**4, 10**6, 10**8)
    ]
    found = report(timed, backend="gloo", transport="TCP", refused=[])
    assert "half of its best bandwidth at 977 KiB" in found.advice[0]
    assert "100 µs" in found.advice[0]


def test_what_a_backend_lacks_is_said():
    said = {"timed": [], "backend": "gloo", "transport": "TCP", "refused": ["all_to_all: not supported"]}
    assert read_answer(json.dumps(said)).notes == ["all_to_all: not supported"]


@pytest.mark.integration
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_of_this_machine_measure_every_operation(ranks):
    found = bench_here(ranks, operations=OPERATIONS, sizes=[64, 1 << 16], seconds=0.01)
    done = {one.name.split()[0] for one in found.figures}
    refused = {note.partition(":")[0] for note in found.notes}
    assert done | refused == set(OPERATIONS)
    assert "all_reduce" in done
    assert all(one.value > 0 for one in found.figures)
    assert found.of.startswith(f"{ranks} ranks, gloo over TCP")


@pytest.mark.integration
def test_ranks_that_torchrun_started_answer_once(tmp_path):
    stoker = shutil.which("stoker", path=sysconfig.get_path("scripts"))
    words = ["bench", "collective", "--only", "all_reduce", "--sizes", "1KiB", "--seconds", "0.01", "--json"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            "2",
            "--no-python",
            stoker,
            *words,
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["figures"][0]["name"] == "all_reduce 1 KiB"


@pytest.mark.integration
def test_a_rank_that_fails_is_an_error_with_its_word(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    monkeypatch.setattr("stoker.bench.collective.OWN_INTERFACE", "nowhere0")
    with pytest.raises(StokerError, match="a rank ended with"):
        bench_here(2, operations=["all_reduce"], sizes=[64], seconds=0.01)
