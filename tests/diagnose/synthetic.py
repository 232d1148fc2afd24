"""Recordings of runs that never were: a loop, a card and a host simulated, with faults put in.

A run is a row of pieces (computing, waiting for data, copying, saving, spinning, …). What a card and a host
show during each kind of piece comes from the recordings of the real H200, spread out at random over other
machines, rates and strengths; the sampler's lag and noise are simulated. The same seed makes the same run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

Line = dict[str, Any]
Piece = tuple[str, float, float]  # what, from, to

# name, power limit, memory, boost clock, pinned copies GB/s, has GPM counters
CARDS = (
    ("NVIDIA H200", 700.0, 150754820096, 1980, 55.0, True),
    ("NVIDIA H100 80GB HBM3", 700.0, 85520809984, 1980, 55.0, True),
    ("NVIDIA B200", 1000.0, 191503433728, 1965, 55.0, True),
    ("NVIDIA A100-SXM4-80GB", 400.0, 85899345920, 1410, 25.0, False),
    ("NVIDIA L40S", 350.0, 48305799168, 2520, 25.0, False),
)


@dataclass(frozen=True, kw_only=True)
class Shows:
    """What card and host show during one kind of piece."""

    util: float = 0.0
    sm: float = 0.0
    tensor: float = 0.0
    fp32: float = 0.05
    dram: float = 0.1
    power: float = 0.18  # of the limit
    cores: float = 0.05
    iowait: float = 0.0  # cores
    read: float = 0.0  # bytes/s
    write: float = 0.0
    rx: float = 0.0  # GB/s into the card
    reasons: int = 0
    clock: float = 1.0


@dataclass
class Run:
    """A run to be simulated: what its pieces show, and the pieces of every step."""

    label: str
    cause: str | None = None
    also: tuple[str, ...] = ()  # further findings that are right
    compute_s: float = 0.06
    steps: int = 150
    jitter: float = 0.01
    shows: dict[str, Shows] = field(default_factory=dict)
    pieces: Callable[[int, float], list[tuple[str, float]]] = lambda step, compute: [("compute", compute)]
    tail: tuple[str, float] | None = None  # after the last step
    header: dict[str, Any] = field(default_factory=dict)
    fb_used: Callable[[np.ndarray], np.ndarray] = lambda t: np.full(len(t), 0.2)
    shm: Callable[[np.ndarray], np.ndarray] = lambda t: np.zeros(len(t))
    flops: float = 0.35  # of the bf16 peak, while computing; 0: not told
    bytes: float = 0.0
    ranks: int = 1
    slow_rank: tuple[int, str, float] | None = None
    background_cores: float = 0.0


FED = Shows(util=98, sm=89, tensor=34, fp32=4.3, dram=39, power=0.97, cores=1.0, rx=0.05, reasons=4)
IDLE = Shows()
COUNTERS = {"sm": "sm_util", "tensor": "any_tensor_util", "fp32": "fp32_util", "dram": "dram_bw_util"}
# Which part of a step a piece is booked as.
PART = {
    "data": "data_wait",
    "h2d": "h2d",
    "compute": "compute",
    "slow": "compute",
    "collective": "collective",
}


# --- faults ---------------------------------------------------------------------------------------


def healthy(rng: np.random.Generator) -> Run:
    run = Run(label="healthy", shows={"compute": _spread(rng, FED), "data": IDLE, "save": IDLE})
    which = rng.integers(0, 12)
    if which == 1:  # a memory-bound model
        run.shows["compute"] = replace(FED, tensor=8, dram=82, power=0.7, reasons=0)
        run.flops = 0.06
    elif which == 2:  # short waits
        run.pieces = lambda step, compute: [("data", 0.03 * compute * rng.random()), ("compute", compute)]
    elif which == 3:  # steps of uneven length
        run.jitter = 0.25
    elif which == 4:  # a full card that does not mind
        run.fb_used = lambda t: np.full(len(t), 0.96)
    elif which == 5:  # saving in the background, and cheaply
        run.shows["save"] = replace(IDLE, write=3e8)
        run.pieces = lambda step, compute: [("compute", compute), *_every(step, 60, "save", compute)]
    elif which == 6:  # evaluation on the GPU in the middle
        run.shows["evaluate"] = run.shows["compute"]
        run.pieces = lambda step, compute: [("compute", compute), *_every(step, 70, "evaluate", 3.0)]
    elif which == 7:  # a slow first step: compilation
        run.shows["compile"] = replace(IDLE, cores=3.0)
        run.pieces = lambda step, compute: [*([("compile", 4.0)] if step == 1 else []), ("compute", compute)]
    elif which == 8:  # busy neighbours that do not hurt
        run.background_cores = 6.0
    elif which == 9:  # a middling card: smaller kernels, no power cap
        run.shows["compute"] = replace(FED, util=93, sm=62, tensor=18, power=0.6, reasons=0)
        run.flops = 0.2
    elif which == 10:  # the loop waits, but the card has queued work
        run.shows["data"] = run.shows["compute"]
        run.pieces = lambda step, compute: [("data", 0.4 * compute), ("compute", 0.6 * compute)]
    elif which == 11:  # the first batch comes late, once
        run.pieces = lambda step, compute: [*([("data", 1.5)] if step == 1 else []), ("compute", compute)]
    return run


def starved(rng: np.random.Generator) -> Run:
    causes = ["cpu", "storage", "quota", "too_few_workers", "contention", "unknown", "startup"]
    cause = str(rng.choice(causes))
    strength = rng.uniform(0.15, 4.0)
    waits = {
        "cpu": Shows(cores=rng.uniform(0.9, 1.1)),
        "storage": Shows(iowait=rng.uniform(0.5, 3.0), read=rng.uniform(2e7, 2e9), cores=0.2),
        "quota": Shows(cores=3.9),
        "too_few_workers": Shows(cores=rng.uniform(2.0, 3.1)),
        "contention": Shows(cores=15.5, iowait=0.3),
        "unknown": Shows(),
        "startup": Shows(cores=1.2),
    }
    run = Run(label="data_starvation", cause=None if cause == "unknown" else cause)
    run.shows = {"compute": _spread(rng, FED), "data": waits[cause]}
    run.pieces = lambda step, compute: [
        ("data", strength * compute * rng.uniform(0.8, 1.2)),
        ("compute", compute),
    ]
    if cause == "quota":
        run.header["quota_cores"] = 4.0
    if cause == "too_few_workers":
        run.header["num_workers"] = round(waits[cause].cores)
    if cause == "contention":
        run.header["num_workers"] = 4
        run.shows["compute"] = replace(run.shows["compute"], cores=15.5)
    if cause == "startup":
        run.pieces = lambda step, compute: [*_every(step - 1, 40, "data", 1.5), ("compute", compute)]
    if cause == "unknown" and rng.random() < 0.5:  # every so often a late batch
        run.pieces = lambda step, compute: [*_every(step, 25, "data", 2.0), ("compute", compute)]
    return run


def red_herring(rng: np.random.Generator) -> Run:
    """Two cores, both busy: what looks like a slow disk is too few CPUs."""
    run = Run(label="data_starvation", cause="cpu", header={"cpus": 2, "num_workers": 2})
    run.shows = {
        "compute": replace(FED, cores=1.9),
        "data": Shows(cores=1.9, iowait=rng.uniform(0.3, 0.6), read=5e7),
    }
    run.pieces = lambda step, compute: [("data", rng.uniform(0.5, 2.0) * compute), ("compute", compute)]
    return run


def copying(rng: np.random.Generator) -> Run:
    pinned = bool(rng.random() < 0.5)
    cause = "not overlapped" if pinned else "pageable"
    run = Run(label="h2d_copy", cause=cause, compute_s=rng.uniform(0.015, 0.1))
    share = rng.uniform(0.2, 1.0) if pinned else rng.uniform(0.3, 5.0)
    busy = Shows(util=98 if pinned else 16, power=0.25, cores=1.0, rx=1.0, dram=3)
    run.shows = {"compute": replace(FED, tensor=13, power=0.6, reasons=0), "h2d": busy}
    run.pieces = lambda step, compute: [("h2d", share * compute), ("compute", compute)]
    run.bytes = (1.0 if pinned else 0.15) * share * run.compute_s  # × the bus rate, set by the machine
    run.flops = 0.0
    return run


def spinning(rng: np.random.Generator) -> Run:
    run = Run(label="collective_hang", steps=int(rng.integers(30, 120)))
    spin = Shows(util=100, sm=0.7, power=0.2, cores=1.0)
    run.shows = {"compute": _spread(rng, FED), "spin": spin}
    return _stop(rng, run, "spin", rng.uniform(4, 20))


def stopping(rng: np.random.Generator) -> Run:
    run = Run(label="host_hang", steps=int(rng.integers(30, 120)))
    run.shows = {"compute": _spread(rng, FED), "stop": replace(IDLE, cores=rng.choice([0.05, 1.0]))}
    return _stop(rng, run, "stop", rng.uniform(7, 20))


def _stop(rng: np.random.Generator, run: Run, piece: str, seconds: float) -> Run:
    if rng.random() < 0.5:
        run.tail = (piece, seconds)
    else:
        at = run.steps // 2
        run.pieces = lambda step, compute: [("compute", compute), *([(piece, seconds)] if step == at else [])]
    return run


def saving(rng: np.random.Generator) -> Run:
    run = Run(label="checkpoint_stall", compute_s=rng.uniform(0.03, 0.2))
    every, seconds = int(rng.integers(15, 45)), rng.uniform(0.8, 4.0)
    write = 0.0 if rng.random() < 0.3 else rng.uniform(2e8, 2e9)
    run.shows = {"compute": _spread(rng, FED), "save": Shows(util=3, write=write, cores=0.9, iowait=0.2)}
    run.pieces = lambda step, compute: [("compute", compute), *_every(step, every, "save", seconds)]
    return run


def full_shm(rng: np.random.Generator) -> Run:
    run = Run(label="shm_pressure", header={"num_workers": 8})
    run.shows = {"compute": _spread(rng, FED), "stop": IDLE}
    if rng.random() < 0.5:
        level = rng.uniform(0.9, 0.99)
        run.shm = lambda t: np.full(len(t), level)
    else:
        start, end = rng.uniform(0.1, 0.3), rng.uniform(0.5, 0.8)
        run.shm = lambda t: start + (end - start) * t / t[-1]
    if rng.random() < 0.3:
        run.tail, run.header["ended"] = ("stop", 8.0), "exit 1: loader worker killed by SIGBUS"
        run.shm = lambda t: np.minimum(0.3 + 0.7 * t / t[-1], 0.99)
    return run


def throttled(rng: np.random.Generator) -> Run:
    bit = int(rng.choice([8, 32, 64, 128]))
    slow = replace(FED, reasons=bit | 4, clock=rng.uniform(0.4, 0.85), power=rng.uniform(0.5, 0.9))
    run = Run(label="throttling", shows={"compute": FED, "slow": slow})
    share = rng.uniform(0.3, 1.0)
    run.pieces = lambda step, compute: [("slow" if (step % 20) / 20 < share else "compute", compute)]
    return run


def in_fp32(rng: np.random.Generator) -> Run:
    units = {"tensor": rng.uniform(0, 4), "fp32": rng.uniform(40, 70)}
    shows = replace(FED, util=99.6, sm=95, dram=9, power=0.9, reasons=0, **units)
    return Run(label="precision", compute_s=0.22, steps=60, flops=0.049, shows={"compute": shows})


def launching(rng: np.random.Generator) -> Run:
    util = rng.uniform(8, 90)
    shows = Shows(util=util, sm=util * rng.uniform(0.02, 0.25), power=rng.uniform(0.17, 0.28), cores=1.02)
    return Run(label="launch_bound", compute_s=0.045, flops=0.002, shows={"compute": shows})


def syncing(rng: np.random.Generator) -> Run:
    util = rng.uniform(30, 72)
    power = 0.18 + 0.7 * util / 100
    shows = replace(FED, util=util, sm=0.85 * util, tensor=0.3 * util, power=power, reasons=0)
    return Run(label="host_sync", flops=0.3 * util / 100, shows={"compute": shows})


def full_card(rng: np.random.Generator) -> Run:
    run = Run(label="memory_pressure", flops=0.32)
    shows = replace(FED, util=97, sm=75, tensor=28, power=0.85)
    run.shows = {"compute": shows, "empty": replace(shows, sm=5, tensor=0, power=0.6)}
    cost, level = rng.uniform(0.08, 0.5), rng.uniform(0.86, 0.96)
    run.pieces = lambda step, compute: [("compute", compute), ("empty", cost * compute)]
    run.fb_used = lambda t: level - 0.09 * rng.random(len(t))
    return run


def late_rank(rng: np.random.Generator) -> Run:
    ranks = int(rng.integers(2, 9))
    run = Run(label="straggler", ranks=ranks, steps=80)
    run.shows = {"compute": FED, "collective": replace(FED, sm=5, power=0.4), "data": IDLE}
    phase = str(rng.choice(["data", "compute"]))
    run.slow_rank = (int(rng.integers(0, ranks)), phase, rng.uniform(0.15, 1.0))
    run.cause = phase
    return run


def exchanging(rng: np.random.Generator) -> Run:
    run = Run(label="communication_bound", ranks=int(rng.integers(2, 9)), steps=80)
    share = rng.uniform(0.3, 1.5)
    run.shows = {"compute": FED, "collective": Shows(util=100, sm=12, power=0.45, cores=1.0)}
    run.pieces = lambda step, compute: [("compute", compute), ("collective", share * compute)]
    return run


def two_at_once(rng: np.random.Generator) -> Run:
    """A loop that waits for data and also saves: both, the dearer one first."""
    wait, every, seconds = rng.uniform(0.5, 1.5), 30, rng.uniform(0.4, 0.8)
    run = Run(label="data_starvation", cause="cpu", also=("checkpoint_stall",))
    run.shows = {"compute": FED, "data": Shows(cores=1.0), "save": Shows(util=3, write=1e9, cores=0.9)}
    run.pieces = lambda step, compute: [
        ("data", wait * compute),
        ("compute", compute),
        *_every(step, every, "save", seconds),
    ]
    return run


FAULTS = (
    starved,
    red_herring,
    copying,
    spinning,
    stopping,
    saving,
    full_shm,
    throttled,
    in_fp32,
    launching,
    syncing,
    full_card,
    late_rank,
    exchanging,
    two_at_once,
)


def _spread(rng: np.random.Generator, shows: Shows) -> Shows:
    strength = rng.uniform(0.75, 1.0)
    power = shows.power * rng.uniform(0.8, 1.0)
    reasons = 4 if power > 0.9 else 0
    return replace(
        shows, sm=shows.sm * strength, tensor=shows.tensor * strength, power=power, reasons=reasons
    )


def _every(step: int, steps: int, what: str, seconds: float) -> list[tuple[str, float]]:
    return [(what, seconds)] if step % steps == 0 else []


# --- the machine ----------------------------------------------------------------------------------


def record(run: Run, rng: np.random.Generator, path: Path) -> Path:
    """Simulate the run on a random machine and write its flat recording."""
    name, limit, memory, boost, bus, counters = CARDS[rng.integers(0, len(CARDS))]
    hz = float(rng.choice([1.0, 5.0, 10.0]))
    needs_counters = run.label in ("precision", "launch_bound", "host_sync", "memory_pressure")
    header = {
        "kind": "header",
        "format": "stoker-flat-trace/1",
        "gpu": name,
        "power_limit_w": limit,
        "mem_total": memory,
        "cpus": 16,
        "scenario": "?",
        "label": ["?"],
        **run.header,
    }
    lines: list[dict[str, Any]] = []
    wall = 0.0
    for rank in range(run.ranks):
        steps, pieces = _loop(run, rng, rank, _peak(name), bus)
        wall = max(wall, pieces[-1][2])
        lines += [{**step, **({"rank": rank} if run.ranks > 1 else {})} for step in steps]
        of = (limit, memory, boost, bus)
        lines += _card_lines(run, rng, pieces, hz=hz, rank=rank, of=of, counters=counters or needs_counters)
        if rank == 0:
            lines += _host_lines(run, rng, pieces, hz=hz, cpus=int(header["cpus"]))
    lines.sort(key=lambda line: line["t"])
    path.write_text("\n".join(json.dumps(line) for line in [header, *lines]) + "\n")
    return path


def _peak(name: str) -> float:
    from stoker.gpus import peaks_of

    peaks = peaks_of(name)
    return peaks.bf16 * 1e12 if peaks else 1e14


def _loop(
    run: Run, rng: np.random.Generator, rank: int, peak: float, bus: float
) -> tuple[list[Line], list[Piece]]:
    t, steps, pieces = 0.0, [], []
    for number in range(1, run.steps + 1):
        compute = max(run.compute_s * (1 + run.jitter * rng.standard_normal()), 0.2 * run.compute_s)
        begin = t
        parts = {"data_wait": 0.0, "h2d": 0.0, "compute": 0.0, "other": 0.0}
        for what, seconds in _with_others(run, rank, run.pieces(number, compute), compute):
            pieces.append((what, t, t + seconds))
            part = PART.get(what, "other")
            parts[part] = parts.get(part, 0.0) + seconds
            t += seconds
        step = {"kind": "step", "t": round(t, 4), "step": number, "total": round(t - begin, 6)}
        step |= {part: round(seconds, 6) for part, seconds in parts.items()}
        if run.flops:
            step["flops"] = run.flops * peak * compute
        if run.bytes:
            step["bytes"] = int(run.bytes * bus * 1e9)
        steps.append(step)
    if run.tail:
        pieces.append((run.tail[0], t, t + run.tail[1]))
    return steps, pieces


def _with_others(
    run: Run, rank: int, pieces: list[tuple[str, float]], compute: float
) -> list[tuple[str, float]]:
    """All ranks end a step together: those that are done wait in the collective."""
    if run.slow_rank is None:
        return pieces
    late, phase, extra = run.slow_rank
    longer = extra * compute
    if rank != late:
        return [*pieces, ("collective", longer + 0.02 * compute)]
    own = [(phase, longer), *pieces] if phase == "data" else [*pieces, (phase, longer)]
    return [*own, ("collective", 0.02 * compute)]


def _card_lines(
    run: Run,
    rng: np.random.Generator,
    pieces: list[Piece],
    *,
    hz: float,
    rank: int,
    of: tuple[float, int, float, float],
    counters: bool,
) -> list[Line]:
    limit, memory, boost, bus = of
    t = np.arange(1 / hz, pieces[-1][2] + 0.5 / hz, 1 / hz)
    now, lagging = _shares(pieces, t, 1 / hz), _shares(pieces, t, max(1 / hz, 0.3))
    util, power = _mix(run, lagging, "util"), _mix(run, _shares(pieces, t, max(1 / hz, 0.6)), "power")
    busiest = [max(now, key=lambda what: now[what][i]) for i in range(len(t))]
    fb = run.fb_used(t) * memory
    lines = []
    for i in range(len(t)):
        shows = run.shows[busiest[i]]
        line = {
            "kind": "gpu",
            "t": round(float(t[i]), 4),
            "util": _noisy(rng, util[i], 1, 100),
            "mem_util": min(1.27 * shows.dram, 100),
            "power_w": _noisy(rng, power[i] * limit, 0.01 * limit, 1.02 * limit),
            "temp_c": 50 + 30 * power[i],
            "sm_mhz": _noisy(rng, shows.clock * boost, 5, boost),
            "event_reasons": shows.reasons,
            "fb_used": float(fb[i]),
        }
        if counters:
            for name, column in COUNTERS.items():
                mean = sum(now[what][i] * getattr(run.shows[what], name) for what in now)
                line[column] = _noisy(rng, mean, 0.3, 100)
        copied = run.bytes * bus * 1e9 * run.steps / pieces[-1][2] / 2**20
        line["pcie_rx_mib"] = copied if run.bytes else 50.0
        if run.ranks > 1:
            line["gpu"] = rank
        lines.append(line)
    return lines


def _host_lines(
    run: Run, rng: np.random.Generator, pieces: list[Piece], *, hz: float, cpus: int
) -> list[Line]:
    t = np.arange(1 / hz, pieces[-1][2] + 0.5 / hz, 1 / hz)
    now = _shares(pieces, t, 1 / hz)
    cores, iowait, read, write = (_mix(run, now, name) for name in ("cores", "iowait", "read", "write"))
    shm, total = run.shm(t), 64 * 2**30
    lines = []
    for i in range(len(t)):
        busy = min(max(cores[i] + run.background_cores + 0.03 * rng.standard_normal(), 0.0), cpus)
        each = [max(min(100.0 * (busy - core), 100.0), 0.0) for core in range(cpus)]
        rng.shuffle(each)
        lines.append(
            {
                "kind": "host",
                "t": round(float(t[i]), 4),
                "cpu": [round(one, 1) for one in each],
                "iowait": 100 * iowait[i] / cpus,
                "disk_read": read[i] / hz,
                "disk_write": write[i] / hz,
                "shm_used": float(shm[i] * total),
                "shm_total": total,
                "mem_avail": 10**11,
            }
        )
    return lines


def _shares(pieces: list[Piece], t: np.ndarray, window: float) -> dict[str, np.ndarray]:
    """Of the window before each moment: how much of it was what."""
    edges = np.array([pieces[0][1], *(end for _, _, end in pieces)])
    names = np.array([what for what, _, _ in pieces])
    found = {}
    for what in sorted(set(names.tolist())):
        sums = np.concatenate([[0.0], np.cumsum(np.where(names == what, np.diff(edges), 0.0))])
        found[what] = (np.interp(t, edges, sums) - np.interp(t - window, edges, sums)) / window
    return found


def _mix(run: Run, shares: dict[str, np.ndarray], field_: str) -> np.ndarray:
    return sum(share * getattr(run.shows[what], field_) for what, share in shares.items())


def _noisy(rng: np.random.Generator, value: float, spread: float, most: float) -> float:
    return round(float(min(max(value + spread * rng.standard_normal(), 0.0), most)), 3)
