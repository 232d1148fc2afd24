"""Recordings to show: the flat ones of the shared folder, and a made-up job of several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from stoker.findings import Finding
from stoker.recording import (
    KINDS,
    Event,
    GpuRecord,
    HostRecord,
    RankRecord,
    Recording,
    Samples,
    Spans,
    Steps,
)
from stoker.watch.runs.flat import read_flat

if TYPE_CHECKING:
    pass

TRACES = Path(__file__).parents[1] / "recordings" / "runs"
STARTED = 1_763_190_000.0
Parts = list[tuple[str, float]]

STARVED = Finding(
    kind="data_starvation",
    cause="cpu",
    summary="the GPU waits for data: 2 loader workers keep their cores at 100%",
    share=0.61,
    gpu_seconds=4_932.0,
    speedup_if_gone=2.56,
    confidence=0.93,
    evidence=(
        "61% of the wall time passes in the loader's next()",
        "loader workers run 98% of the time (state R): they compute, they do not wait for the disk",
        "GPU power 326 W of 700 W; tensor cores active 10% of the time",
    ),
    remedy=(
        "num_workers=6: 8 cores are allowed by the cgroup and 2 are busy",
        "decode once, before training: stoker prepare run --to s3://bucket/decoded",
    ),
    missing=("run delay of the workers (schedstat could not be read)",),
)
STRAGGLER = Finding(
    kind="straggler",
    summary="rank 3 is 21 ms late at every step",
    share=0.14,
    gpu_seconds=1_130.0,
    speedup_if_gone=1.16,
    confidence=0.8,
    evidence=("ranks 0–2 wait 21 ms of 150 ms in all_reduce; rank 3 does not",),
    remedy=("look at the node of rank 3: stoker doctor on node-1",),
)
HEALTHY = Finding(
    kind="healthy",
    summary="the GPU is fed: 99% of the time is compute",
    confidence=0.95,
    evidence=("power 676 W of 700 W: the cap is the next ceiling, and a healthy one",),
)


def job(
    *,
    ranks: int = 4,
    steps: int = 300,
    late: int | None = 3,
    hz: float = 1.0,
    title: str = "python train.py --config gpt.yaml",
    seed: int = 1,
) -> Recording:
    """A job on two nodes: start-up, steps, a save every 100; one rank is late, the others wait for it."""
    rng = np.random.default_rng(seed)
    own = rng.normal(0.06, 0.002, (ranks, steps)).clip(0.05)
    data = rng.gamma(2.0, 0.03, (ranks, steps))
    if late is not None:
        own[late] += 0.021
    whole = (own + data).max(axis=0) + 0.004
    records = []
    for rank in range(ranks):
        parts: Parts = [("startup", 6.0)]
        for step in range(steps):
            wait = whole[step] - own[rank, step] - data[rank, step]
            parts += [("data", data[rank, step]), ("h2d", 0.002), ("forward", own[rank, step] * 0.3)]
            parts += [("backward", own[rank, step] * 0.6), ("collective", wait)]
            parts += [("optimizer", own[rank, step] * 0.1 - 0.003)]
            if step % 100 == 99:
                parts.append(("checkpoint", 3.0))
        records.append(rank_record(parts, rank=rank, node=f"node-{rank * 2 // ranks}", gpu=rank % 2))
    wall_s = max(float(record.spans.end[-1]) for record in records) + 1.5
    t = np.arange(0, wall_s, 1 / hz)
    return Recording(
        title=title,
        wall_s=wall_s,
        ended="exit 0",
        ranks=tuple(records),
        gpus=tuple(_gpu(record, t, rng) for record in records),
        hosts=tuple(_host(node, t, rng) for node in sorted({record.node for record in records})),
        facts={"started": STARTED, "argv": title.split(), "torch": "2.13.0", "loader": {"num_workers": 2}},
    )


def rank_record(
    parts: Parts, *, rank: int = 0, node: str = "node-0", gpu: int | None = 0, tokens: float = 16384
) -> RankRecord:
    """Spans one after another; a step lasts from its data to the next."""
    kind = np.array([KINDS.index(name) for name, _ in parts], dtype=np.uint8)
    end = np.cumsum([seconds for _, seconds in parts])
    start = end - [seconds for _, seconds in parts]
    first = np.flatnonzero(kind == KINDS.index("data"))
    edges = np.append(start[first], end[-1]) if len(first) else np.empty(0)
    number = np.arange(len(first))
    return RankRecord(
        rank=rank,
        node=node,
        gpu=gpu,
        spans=Spans(
            kind=kind,
            start=start,
            end=end,
            step=np.maximum(np.searchsorted(first, np.arange(len(kind)), side="right") - 1, -1),
            bytes=np.zeros(len(kind), dtype=np.int64),
        ),
        steps=Steps(
            number=number,
            start=edges[:-1],
            end=edges[1:],
            tokens=np.full(len(number), tokens),
            flops=np.full(len(number), tokens * 1.3e9),
        ),
        memory=Samples(t=np.empty(0), columns={}),
        events=(Event(t=3.0, what="stack", text="train.py:12 in build_vocabulary"),) if rank == 0 else (),
    )


def _gpu(record: RankRecord, t: np.ndarray, rng: np.random.Generator) -> GpuRecord:
    busy = np.zeros(len(t))
    for kind, start, end in zip(record.spans.kind, record.spans.start, record.spans.end, strict=True):
        if KINDS[kind] in ("forward", "backward", "optimizer"):
            busy[int(np.clip(np.searchsorted(t, start), 0, len(t) - 1))] += end - start
    busy = np.clip(busy / max(t[1] - t[0], 1e-9), 0, 1)
    noise = rng.normal(0, 0.02, len(t))
    return GpuRecord(
        node=record.node,
        index=record.gpu or 0,
        name="NVIDIA H200",
        power_limit_w=700.0,
        memory_bytes=150_754_820_096,
        samples=Samples(
            t=t,
            columns={
                "util": 100 * np.clip(busy * 1.2 + noise, 0, 1),
                "sm_util": 100 * np.clip(busy + noise, 0, 1),
                "any_tensor_util": 100 * np.clip(busy * 0.34 + noise / 3, 0, 1),
                "dram_bw_util": 40 * busy,
                "pcie_rx_mib": 45 * busy,
                "power_w": 120 + 500 * np.clip(busy + noise, 0, 1),
                "temp_c": 45 + 10 * busy,
                "sm_mhz": np.full(len(t), 1950.0),
                "fb_used": np.full(len(t), 2.06e10),
            },
        ),
    )


def _host(node: str, t: np.ndarray, rng: np.random.Generator) -> HostRecord:
    columns = {
        "cpu": rng.normal(25, 3, len(t)).clip(0, 100),
        "iowait": rng.gamma(1, 0.5, len(t)),
        "shm_used": np.linspace(1e8, 6e9, len(t)),
        "shm_total": np.full(len(t), 64 * 2.0**30),
        "mem_avail": np.full(len(t), 1.2e11),
        "disk_read": rng.gamma(2, 1e7, len(t)),
        "disk_write": rng.gamma(1, 1e6, len(t)),
    }
    return HostRecord(node=node, cpus=8, quota_cores=8.0, samples=Samples(t=t, columns=columns))


def flat(name: str) -> Recording:
    """One of the shared flat recordings of a real H200."""
    return read_flat(TRACES / f"{name}.jsonl")


# --- a run while it goes --------------------------------------------------------------------------


def until(recording: Recording, t: float) -> Recording:
    """A recording as it was at a moment: only what had ended by then."""
    return replace(
        recording,
        wall_s=t,
        ended="running",
        ranks=tuple(
            replace(
                rank,
                spans=_rows(rank.spans, rank.spans.end <= t),
                steps=_rows(rank.steps, rank.steps.end <= t),
                events=tuple(event for event in rank.events if event.t <= t),
            )
            for rank in recording.ranks
        ),
        gpus=tuple(
            replace(gpu, samples=_readings(gpu.samples, gpu.samples.t <= t)) for gpu in recording.gpus
        ),
        hosts=tuple(
            replace(one, samples=_readings(one.samples, one.samples.t <= t)) for one in recording.hosts
        ),
    )


def since(recording: Recording, t: float) -> Recording:
    """A recording whose oldest part was overwritten; its times begin at 0 again."""
    ranks = []
    for rank in recording.ranks:
        spans, steps = (_rows(table, table.start >= t) for table in (rank.spans, rank.steps))
        spans, steps = (replace(one, start=one.start - t, end=one.end - t) for one in (spans, steps))
        ranks.append(replace(rank, spans=spans, steps=steps, events=()))
    return replace(
        recording,
        wall_s=recording.wall_s - t,
        ranks=tuple(ranks),
        gpus=(),
        hosts=(),
        facts={**recording.facts, "dropped_s": t},
    )


def _rows(table: Any, keep: np.ndarray) -> Any:
    return replace(table, **{name: getattr(table, name)[keep] for name in table.__dataclass_fields__})


def _readings(samples: Samples, keep: np.ndarray) -> Samples:
    return Samples(
        t=samples.t[keep], columns={name: column[keep] for name, column in samples.columns.items()}
    )
