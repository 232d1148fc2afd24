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
    visible_cards,
)
from stoker.errors import StokerError, UsageError
from stoker.machine.plain import Unknown
from stoker.machine.snapshot import Gpu, GpuStack

TIMED = {"operation": "all_reduce", "bytes": 1 << 20, "seconds": 1e-3, "ranks": 2}


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
    said = {"timed": [TIMED], "backend": "gloo", "transport": "TCP", "refused": ["all_to_all: not supported"]}
    assert read_answer(json.dumps(said)).notes == ["all_to_all: not supported"]


def test_where_no_operation_works_there_is_no_empty_table():
    said = {"timed": [], "backend": "nccl", "transport": "", "refused": ["all_reduce: unhandled cuda error"]}
    with pytest.raises(StokerError, match="unhandled cuda error"):
        read_answer(json.dumps(said))


def test_one_rank_says_that_it_has_no_link():
    said = {"timed": [{**TIMED, "ranks": 1}], "backend": "nccl", "transport": "nothing", "refused": []}
    found = read_answer(json.dumps(said))
    assert "no link" in found.notes[0] or "a link" in found.notes[0]
    assert found.figures[0].value == 0
    assert found.figures[0].beside["algorithm_bytes_s"] > 0


def test_more_ranks_than_cards_are_refused_before_they_start(monkeypatch):
    monkeypatch.setattr("stoker.bench.collective.visible_cards", lambda environ: 1)
    with pytest.raises(UsageError, match="2 ranks and 1 card") as refused:
        bench_here(2, operations=["all_reduce"], sizes=[64], seconds=0.01)
    assert "--ranks 1" in refused.value.hint
    assert "--backend gloo" in refused.value.hint


@pytest.mark.parametrize(
    ("shown", "cards"), [(None, 8), ("0,1", 2), ("", 0), ("-1", 0), ("0,1,-1,2", 2), ("GPU-1a,GPU-2b", 2)]
)
def test_cards_are_those_that_torch_would_see(monkeypatch, shown, cards):
    inventory = (tuple(Gpu(index=number) for number in range(8)), GpuStack(on_bus=8, torch_cuda="12.8"))
    monkeypatch.setattr("stoker.bench.collective.read_cards", lambda files, environ: inventory)
    environ = {} if shown is None else {"CUDA_VISIBLE_DEVICES": shown}
    assert visible_cards(environ) == cards


def test_cards_that_neither_nvml_nor_nvidia_smi_tells_of_are_counted_on_the_bus(monkeypatch):
    inventory = (Unknown(reason="no NVML"), GpuStack(on_bus=1, torch_cuda="12.8"))
    monkeypatch.setattr("stoker.bench.collective.read_cards", lambda files, environ: inventory)
    assert visible_cards({}) == 1


def test_cards_count_for_nothing_where_torch_was_built_without_cuda(monkeypatch):
    inventory = ((Gpu(index=0),), GpuStack(on_bus=1, torch_cuda=None))
    monkeypatch.setattr("stoker.bench.collective.read_cards", lambda files, environ: inventory)
    assert visible_cards({}) == 0


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


# What torch 2.11 and NCCL 2.28 say of two ranks on one card, shortened.
DUPLICATE = """NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, NCCL version 2.28.9
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000"""
SYSTEM = DUPLICATE.replace(
    "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 18000", "socketPollConnect failed"
)
LOG = """node:71:71 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB [RO]; OOB eth0:10.0.0.1<0>
node:71:93 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
node:71:93 [0] NCCL INFO Channel 01/0 : 0[0] -> 1[1] via P2P/CUMEM
node:71:93 [0] NCCL INFO Channel 00/0 : 7[7] -> 8[0] [receive] via NET/IB/0/GDRDMA
"""


def test_the_line_of_an_nccl_error_that_says_something_is_told():
    rank = pytest.importorskip("stoker.bench.collective_rank")
    assert "same card" in rank.why(DUPLICATE)
    assert rank.why(SYSTEM) == "socketPollConnect failed"
    assert rank.why("Connection refused\n  at tcp.cc:1") == "Connection refused"


def test_the_transport_is_what_nccl_s_channels_say():
    rank = pytest.importorskip("stoker.bench.collective_rank")
    assert rank.transports(LOG) == "P2P/CUMEM, NET/IB/0/GDRDMA"
    assert "NCCL_DEBUG" in rank.transports("")
