"""Recordings that hold a little of everything, drawn by a seed: every kind of span, event, look and reading.

They are no likely runs. What is read out of them, and what the rules say of it, is kept in `kept/`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from stoker.recording import (
    KINDS,
    WORK,
    Activity,
    Event,
    GpuRecord,
    HostRecord,
    RankRecord,
    Recording,
    Samples,
    Seen,
    Spans,
    Stacks,
    Steps,
)

_KERNELS = (
    "sm90_xmma_gemm_bf16",
    "ampere_sgemm_128x64",
    "elementwise_kernel",
    "ncclDevKernel_AllReduce",
    "flash_fwd_kernel",
    "Memcpy HtoD",
)
_DOES = (
    "batch",
    "logging",
    "metrics",
    "output",
    "saving",
    "io",
    "gc",
    "lock",
    "optimizer",
    "average",
    "other",
    "compute",
)
_LINES = ("/home/me/train.py:12 work", "/home/me/train.py:40 work", "/home/me/data.py:7 read", "")
_CARDS = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "a card of its own")
_ENDED = (
    "exit 0",
    "running",
    "killed by SIGBUS",
    "exit 1: CUDA out of memory",
    "exit 1: Connection closed by peer",
    "",
)
_ENDINGS: tuple[dict[str, Any], ...] = (
    {
        "kind": "crashed",
        "cause": "signal",
        "text": "killed by SIGKILL",
        "rank": 1,
        "at": 3.25,
        "chain": ["OSError: disk"],
    },
    {
        "kind": "crashed",
        "cause": "out_of_memory",
        "text": "CUDA out of memory",
        "where": "train.py:9",
        "at": 2,
    },
    {"kind": "crashed", "cause": "exit", "line": "exit 3", "rank": 0},
    {"kind": "crashed", "cause": "nccl", "text": "rank 2 timed out"},
    {"kind": "crashed", "cause": "worker", "text": "a worker died"},
    {"kind": "preempted", "cause": "signal", "text": "SIGTERM from outside"},
    {"kind": "interrupted", "text": "Ctrl-C", "at": 1.5},
)
_READINGS = {
    "util": 100,
    "sm_util": 100,
    "any_tensor_util": 60,
    "fp32_util": 60,
    "dram_bw_util": 90,
    "mem_util": 60,
    "power_w": 400,
    "pcie_rx_mib": 20_000,
    "sm_mhz": 1980,
    "temp_c": 90,
}
_HOST = {
    "trainer_cores": 3,
    "trainer_delay": 0.6,
    "trainer_cpu": 1,
    "trainer_blocked": 0.6,
    "workers": 4,
    "workers_delay": 1.5,
    "workers_cpu": 3,
    "workers_running": 3,
    "workers_blocked": 2,
    "iowait": 30,
    "throttled": 20,
    "steal": 15,
    "disk_write": 2e8,
    "net_rx": 2e7,
    "nfs_read": 2e7,
    "trainer_disk": 3e6,
    "workers_disk": 5e6,
    "workers_read": 1e6,
    "workers_read_calls": 40,
}


def any_run(seed: int) -> Recording:
    """A recording of one to four ranks, of some fifty steps each."""
    rng = np.random.default_rng([seed, 27])
    count, ranks = int(rng.integers(8, 60)), int(rng.choice([1, 1, 2, 4]))
    usual, startup = float(rng.uniform(0.05, 0.4)), float(rng.choice([0.0, 0.5, 4.0]))
    each = tuple(_rank(rng, number, count=count, usual=usual, startup=startup) for number in range(ranks))
    wall_s = max(float(one.steps.end[-1]) for one in each) + float(rng.choice([0.0, 0.3, 9.0]))
    gpus = tuple(_card(rng, number, wall_s) for number in range(int(rng.integers(0, ranks + 1))))
    hosts = tuple(_host(rng, wall_s) for _ in range(int(rng.integers(0, 3))))
    return Recording(
        title="any.py",
        wall_s=wall_s,
        ended=str(rng.choice(_ENDED)),
        ranks=each,
        gpus=gpus,
        hosts=hosts,
        facts=_facts(rng),
    )


def _rank(rng: np.random.Generator, number: int, *, count: int, usual: float, startup: float) -> RankRecord:
    took = usual * rng.uniform(0.9, 1.1, count)
    took[0] *= float(rng.choice([1, 3, 12]))
    every = int(rng.choice([7, 11, 1000]))
    took[every::every] += float(rng.uniform(0.5, 3))
    end = startup + np.cumsum(took)
    start = end - took * rng.choice([1.0, 0.97])
    spans = _spans(rng, start, end)
    events = tuple(_event(rng, float(end[-1])) for _ in range(int(rng.integers(0, 6))))
    steps = Steps(
        number=np.arange(count) + int(rng.integers(0, 2)),
        start=start,
        end=end,
        tokens=np.full(count, 4096.0) if rng.random() < 0.5 else np.full(count, math.nan),
        flops=np.full(count, 2e13 * usual) if rng.random() < 0.5 else np.full(count, math.nan),
    )
    turns = np.array([0.1, end[-1] / 2, end[-1]])
    memory = Samples(t=turns, columns={"retries": np.array([1.0, 1.0, float(rng.integers(1, 3))])})
    looks = (_look(rng, *sorted(rng.uniform(0, end[-1], 2).tolist())),) if rng.random() < 0.6 else ()
    return RankRecord(
        rank=number,
        node="a",
        gpu=number,
        spans=spans,
        steps=steps,
        memory=memory,
        events=tuple(sorted(events, key=lambda one: one.t)),
        stacks=_stacks(rng),
        looks=looks,
    )


def _spans(rng: np.random.Generator, start: np.ndarray, end: np.ndarray) -> Spans:
    """Some of the kinds in each step, one after another, with a little of the step in none of them."""
    kinds = [KINDS.index(str(one)) for one in rng.permutation(KINDS)[: int(rng.integers(2, 6))]]
    shares = np.cumsum(rng.dirichlet(np.ones(len(kinds) + 1)))[: len(kinds)]
    begins = np.concatenate([[0.0], shares[:-1]])
    length = (end - start)[:, None]
    starts, ends = (start[:, None] + length * one for one in (begins, shares))
    kind = np.broadcast_to(kinds, starts.shape)
    return Spans(
        kind=kind.astype(np.uint8).ravel(),
        start=starts.ravel(),
        end=ends.ravel(),
        step=np.repeat(np.arange(len(start)), len(kinds)),
        bytes=np.where(kind == KINDS.index("h2d"), 50_000_000, 0).ravel(),
    )


def _event(rng: np.random.Generator, last_s: float) -> Event:
    what = str(rng.choice(["hang", "hang over", "stack", "workers started", "leaving", "exception"]))
    facts = {
        "in_collective": bool(rng.random() < 0.5),
        "collective_seq": int(rng.integers(1, 4)),
        "collective_op": str(rng.choice(["all_reduce", "broadcast"])),
        "inside": str(rng.choice(["", "data"])),
        "seconds": float(rng.uniform(0, 2)),
        "frames": ["/home/me/train.py:1 <module>", "/home/me/io.py:9 save"],
    }
    text = str(rng.choice(["the program is over", "/home/me/train.py:8 rollout", "Bus error"]))
    return Event(t=float(rng.uniform(0, last_s + 1)), what=what, text=text, facts=facts)


def _stacks(rng: np.random.Generator) -> Stacks:
    if rng.random() < 0.3:
        return Stacks()
    rows = [
        Seen(
            inside=str(rng.choice(["", "", "data", "optimizer", "checkpoint"])),
            what=str(rng.choice(_DOES)),
            line=str(rng.choice(_LINES)),
            seconds=float(rng.uniform(0.1, 2)),
            looks=int(rng.integers(1, 30)),
        )
        for _ in range(int(rng.integers(1, 8)))
    ]
    held, looks = {"/home/me/a.py:1 spin (Thread-1)": 30, "/home/me/b.py:2 log (Thread-2)": 4}, 80
    late = int(rng.choice([0, 20, 50]))
    return Stacks(
        seconds=sum(one.seconds for one in rows),
        seen=tuple(rows),
        looks=looks,
        late=late,
        threads=held if late else {},
        gc_s=float(rng.uniform(0, 2)),
        gc_count=int(rng.choice([0, 9, 10, 40])),
        gc_lines={"/home/me/train.py:12 work": 0.5, "/home/me/data.py:7 read": 0.7, "": 1.0},
    )


def _look(rng: np.random.Generator, begin: float, end: float) -> Activity:
    count = 60
    start = np.sort(rng.uniform(begin, end, count))
    took = rng.uniform(0.1, 1.5, count) * (end - begin) / count
    return Activity(
        start_s=begin,
        end_s=end,
        names=_KERNELS,
        name=rng.integers(0, len(_KERNELS), count).astype(np.int32),
        kind=rng.integers(0, len(WORK), count).astype(np.uint8),
        start=start,
        end=start + took,
        launched=np.where(rng.random(count) < 0.7, start, start - 5 * took),
        bytes=rng.integers(0, 10**6, count),
    )


def _card(rng: np.random.Generator, number: int, wall_s: float) -> GpuRecord:
    t = np.arange(0.2, max(wall_s, 0.5), 0.2)
    of = {name: float(rng.uniform(0.05, 1)) * most for name, most in _READINGS.items() if rng.random() < 0.8}
    columns = {name: np.minimum(mean * rng.uniform(0.8, 1.2, len(t)), 20_000) for name, mean in of.items()}
    if rng.random() < 0.6:
        columns["event_reasons"] = rng.choice([0, 4, 8, 64, 128], len(t)).astype(float)
    if rng.random() < 0.7:
        columns["fb_used"] = 8e10 * np.where(rng.random(len(t)) < 0.3, 0.84, 0.9)
    return GpuRecord(
        node="a",
        index=number,
        name=str(rng.choice(_CARDS)),
        power_limit_w=700.0,
        memory_bytes=80_000_000_000,
        samples=Samples(t=t, columns=columns),
    )


def _host(rng: np.random.Generator, wall_s: float) -> HostRecord:
    t = np.arange(0.25, max(wall_s, 1.0), 0.25)
    columns = {
        name: float(rng.uniform(0.05, 1)) * most * rng.uniform(0.8, 1.2, len(t))
        for name, most in _HOST.items()
        if rng.random() < 0.7
    }
    columns |= {f"core.{core}": rng.uniform(0, 100, len(t)) for core in range(4)}
    if rng.random() < 0.7:
        columns["disk_read"] = np.where(rng.random(len(t)) < 0.7, 3e6, 0.0) * rng.uniform(1, 2, len(t))
        columns["disk_reads"] = columns["disk_read"] / float(rng.choice([4096, 100_000]))
    if rng.random() < 0.7:
        columns["shm_total"] = np.full(len(t), 8.0 * 2**30)
        columns["shm_used"] = columns["shm_total"] * np.linspace(0.1, float(rng.uniform(0.2, 0.97)), len(t))
    quota = float(rng.choice([math.inf, 2.0, 4.0]))
    return HostRecord(node="a", cpus=4, quota_cores=quota, samples=Samples(t=t, columns=columns))


def _facts(rng: np.random.Generator) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "num_workers": int(rng.integers(0, 5)),
        "prefetch_factor": 2,
        "batch_bytes": float(2**20 * 512),
        "unseen": [str(one) for one in rng.permutation(KINDS)[: int(rng.integers(0, 3))]],
        "env": {"NCCL_P2P_DISABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_IB_DISABLE": "0"},
        "missing": ["the clock of node b"],
        "gpu": "NVIDIA H200",
    }
    ending = _ENDINGS[int(rng.integers(0, len(_ENDINGS)))] if rng.random() < 0.5 else None
    facts = {name: value for name, value in facts.items() if rng.random() < 0.6}
    return {
        **facts,
        **({"ending": ending} if ending else {}),
        **({"profiler": "torch"} if rng.random() < 0.1 else {}),
    }
