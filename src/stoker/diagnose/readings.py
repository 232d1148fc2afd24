"""What the card and the host did, as means over the run and inside the loader's waits. Unknown is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.timeline import Timeline
from stoker.gpus import Peaks, peaks_of
from stoker.recording import Floats, GpuRecord, HostRecord, Recording, Samples

# NVML's clock event reasons that mean trouble. Idle (1), application clocks (2), sync boost (16) and the software
# power cap (4) do not: every card at full load is power-capped.
SLOWDOWNS = {
    8: "hardware slowdown",
    32: "thermal, by software",
    64: "thermal, by hardware",
    128: "power brake",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Card:
    """The cards of a run as one: means over all of them, in percent where NVML gives percent."""

    name: str
    peaks: Peaks | None
    readings: int
    util: float
    util_error: float  # of its mean
    sm: float
    tensor: float
    fp32: float
    dram: float
    memory_busy: float  # NVML's own, on cards without the counters above
    power: float  # of the limit
    working_util: float  # while the loop gave it work: means divided by the share of time that had some
    working_sm: float
    idle_readings: float  # share of readings with the card idle
    pcie_rx_gb_s: float
    capped: float  # share of busy readings under the software power cap
    slowed: dict[str, float]  # reason → share of busy readings
    clock: float  # while slowed down, against the best clock seen or known
    clock_mean: float  # of busy readings, against the known boost clock
    temp_c: float
    memory_peak: float  # of the card's memory
    memory_swing: float  # how far what is used goes up and down again, of the card's memory
    memory_turns: float  # how often it turns, a second


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The busiest host."""

    cpus: int
    allowed: float  # cores that we may use
    quota: float
    busy: float  # cores
    wait_busy: (
        float  # cores that we, or if that is unknown anybody, keep busy while the loop waits for a batch
    )
    others: float  # cores that are busy with what is not ours
    iowait: float  # cores
    read_bytes_s: float
    write_bytes_s: float
    reading: float  # share of samples in which anything was read
    read_bytes: float  # of one read
    remote_bytes_s: float  # from servers: the network, NFS, Lustre
    throttled: float  # share of time the cgroup was stopped
    steal: float  # cores
    delay: float  # share of time that what makes batches could run and did not get a core
    workers: float  # how many loader workers were seen
    workers_running: float  # while the loop waits
    workers_blocked: float  # in D, on a disk or a server
    trainer_blocked: float  # share of samples
    shm_peak: float  # of its size
    shm_total: float
    shm_full_in_s: float  # by its trend; inf: never


def card(recording: Recording, *, idle: float, copying: float) -> Card | None:
    """The cards' readings, or nothing where there are none."""
    known = [gpu for gpu in recording.gpus if len(gpu.samples.t)]
    if not known:
        return None
    busy_share = max(1.0 - idle - copying, 0.02)
    util, sm = (_over(known, name) for name in ("util", "sm_util"))
    slowed, clock = _slowdowns(known)
    swing, turns = _memory_turns(known)
    return Card(
        name=known[0].name,
        peaks=peaks_of(known[0].name),
        readings=sum(len(gpu.samples.t) for gpu in known),
        util=util,
        util_error=_mean([_error(gpu.samples.columns.get("util")) for gpu in known]),
        sm=sm,
        tensor=_over(known, "any_tensor_util"),
        fp32=_over(known, "fp32_util"),
        dram=_over(known, "dram_bw_util"),
        memory_busy=_over(known, "mem_util"),
        power=_mean(
            [_steady(gpu.samples, "power_w") / gpu.power_limit_w for gpu in known if gpu.power_limit_w > 0]
        ),
        working_util=min(util / busy_share, 100.0),
        working_sm=min(sm / busy_share, 100.0),
        idle_readings=_mean([_share(gpu.samples.columns.get("util"), below=10.0) for gpu in known]),
        pcie_rx_gb_s=_over(known, "pcie_rx_mib") * 2**20 / 1e9,
        capped=_mean([_flagged(gpu.samples, 4) for gpu in known]),
        slowed=slowed,
        clock=clock,
        clock_mean=_mean([_busy_clock(gpu) for gpu in known]),
        temp_c=_over(known, "temp_c"),
        memory_peak=max(_memory_peak(gpu) for gpu in known),
        memory_swing=swing,
        memory_turns=turns,
    )


def _over(gpus: list[GpuRecord], name: str) -> float:
    return _mean([_steady(gpu.samples, name) for gpu in gpus])


def _steady(samples: Samples, name: str) -> float:
    """The mean without the first second, which still tells of the time before the recording."""
    column = samples.columns.get(name)
    if column is None:
        return math.nan
    late = column[samples.t > samples.t[0] + 1.0] if len(column) > 20 else column
    return _mean(late.tolist())


def _error(column: Floats | None) -> float:
    """The standard error of a column's mean: few readings of a card that swings say little."""
    if column is None or np.isfinite(column).sum() < 2:
        return math.nan
    return float(np.nanstd(column) / math.sqrt(np.isfinite(column).sum()))


def _mean(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def _share(column: Floats | None, *, below: float) -> float:
    if column is None or np.isnan(column).all():
        return math.nan
    return float(np.mean(column[~np.isnan(column)] < below))


def _busy(samples: Samples) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    util = samples.columns.get("util")
    return np.ones(len(samples.t), bool) if util is None else np.nan_to_num(util, nan=100.0) >= 50.0


def _flagged(samples: Samples, bits: int) -> float:
    reasons, busy = samples.columns.get("event_reasons"), _busy(samples)
    if reasons is None or not busy.any():
        return math.nan
    return float(np.mean((np.nan_to_num(reasons[busy]).astype(np.int64) & bits) > 0))


def _slowdowns(gpus: list[GpuRecord]) -> tuple[dict[str, float], float]:
    """Which reasons slowed busy cards down, how often, and to what part of their clock."""
    found: dict[str, float] = {}
    for bit, reason in SLOWDOWNS.items():
        share = max(
            (value for value in (_flagged(gpu.samples, bit) for gpu in gpus) if value > 0), default=0.0
        )
        if share > 0:
            found[reason] = share
    clocks = [clock for clock in map(_slowed_clock, gpus) if not math.isnan(clock)]
    return found, min(clocks, default=math.nan)


def _slowed_clock(gpu: GpuRecord) -> float:
    reasons, clock = (gpu.samples.columns.get(name) for name in ("event_reasons", "sm_mhz"))
    if reasons is None or clock is None:
        return math.nan
    slowed = (np.nan_to_num(reasons).astype(np.int64) & sum(SLOWDOWNS)) > 0
    peaks = peaks_of(gpu.name)
    best = max(float(np.nanmax(clock)), peaks.boost_mhz if peaks else 0.0)
    return _mean(clock[slowed].tolist()) / best if best else math.nan


def _busy_clock(gpu: GpuRecord) -> float:
    clock, peaks = gpu.samples.columns.get("sm_mhz"), peaks_of(gpu.name)
    if clock is None or peaks is None:
        return math.nan
    return _mean(clock[_busy(gpu.samples)].tolist()) / peaks.boost_mhz


def _memory_peak(gpu: GpuRecord) -> float:
    used = gpu.samples.columns.get("fb_used")
    return float(np.nanmax(used)) / gpu.memory_bytes if used is not None and gpu.memory_bytes else math.nan


def _memory_turns(gpus: list[GpuRecord]) -> tuple[float, float]:
    """How far and how often a card's memory is given back and taken again."""
    swings = [(0.0, 0.0)]
    for gpu in gpus:
        used = gpu.samples.columns.get("fb_used")
        if used is None or not gpu.memory_bytes or len(used) < 4:
            continue
        moves = np.diff(used[~np.isnan(used)]) / gpu.memory_bytes
        moves = moves[np.abs(moves) > 0.002]
        turns = int(np.sum(moves[1:] * moves[:-1] < 0)) if len(moves) > 1 else 0
        swing = float(np.nanpercentile(used, 95) - np.nanpercentile(used, 5)) / gpu.memory_bytes
        swings.append((swing, turns / max(float(gpu.samples.t[-1] - gpu.samples.t[0]), 1e-9)))
    return max(swings, key=lambda pair: pair[0] * pair[1])


# --- the host -------------------------------------------------------------------------------------


def host(recording: Recording, line: Timeline | None) -> Host | None:
    """The busiest host's readings, or nothing where there are none."""
    known = [one for one in recording.hosts if len(one.samples.t)]
    if not known:
        return None
    one = max(known, key=lambda record: np.nan_to_num(np.nanmean(_busy_cores(record))))
    samples, busy = one.samples, _busy_cores(one)
    waiting = _waiting(samples, line)
    ours = _ours(samples)
    shm_peak, shm_full_in_s = _shm(samples)
    workers = samples.mean("workers")
    return Host(
        cpus=one.cpus,
        allowed=min(float(one.cpus), one.quota_cores),
        quota=one.quota_cores,
        busy=_mean(busy.tolist()),
        wait_busy=_while_waiting(busy if ours is None else ours, waiting, spinning=ours is None),
        others=math.nan if ours is None else max(_mean((busy - ours).tolist()), 0.0),
        iowait=samples.mean("iowait") / 100 * one.cpus,
        read_bytes_s=samples.mean("disk_read"),
        write_bytes_s=samples.mean("disk_write"),
        reading=1.0 - _share(samples.columns.get("disk_read"), below=1.0),
        read_bytes=_ratio(samples.mean("disk_read"), samples.mean("disk_reads")),
        remote_bytes_s=max(
            (samples.mean(name) for name in _REMOTE if name in samples.columns), default=math.nan
        ),
        throttled=samples.mean("throttled") / 100,
        steal=samples.mean("steal") / 100 * one.cpus,
        delay=_ratio(samples.mean("workers_delay"), workers)
        if workers >= 0.5
        else samples.mean("trainer_delay"),
        workers=workers,
        workers_running=_in_waits(samples, "workers_running", waiting),
        workers_blocked=_in_waits(samples, "workers_blocked", waiting),
        trainer_blocked=samples.mean("trainer_blocked"),
        shm_peak=shm_peak,
        shm_total=samples.mean("shm_total"),
        shm_full_in_s=shm_full_in_s,
    )


_REMOTE = ("net_rx", "nfs_read", "lustre_read")


def _ours(samples: Samples) -> Floats | None:
    """Cores that the trainers and their workers use, where that was read."""
    known = [samples.columns[name] for name in ("workers_cpu", "trainer_cores") if name in samples.columns]
    if "trainer_cores" not in samples.columns:
        return None
    total: Floats = np.nansum(known, axis=0)
    return total


def _in_waits(samples: Samples, name: str, waiting: Floats) -> float:
    column = samples.columns.get(name)
    return math.nan if column is None else _while_waiting(column, waiting, spinning=False)


def _busy_cores(record: HostRecord) -> Floats:
    columns = record.samples.columns
    cores = [column for name, column in columns.items() if name.startswith("core.")]
    if cores:
        total: Floats = np.nansum(cores, axis=0) / 100
        return total
    return (
        columns["cpu"] / 100 * record.cpus if "cpu" in columns else np.full(len(record.samples.t), math.nan)
    )


def _waiting(samples: Samples, line: Timeline | None) -> Floats:
    """What part of each sample's time the loop waited for a batch."""
    before = np.concatenate([[0.0], samples.t[:-1]])
    if line is None:
        return np.zeros(len(samples.t))
    shares: Floats = line.within("data", before, samples.t) / np.maximum(samples.t - before, 1e-9)
    return shares


def _while_waiting(values: Floats, waiting: Floats, *, spinning: bool) -> float:
    """What a reading is while the loop waits: read directly if some samples lie in waits, else by a straight
    line through readings that had more and less waiting in them, else what the waits can have had at most."""
    known = ~np.isnan(values)
    values, waiting = values[known], waiting[known]
    if not len(values) or waiting.mean() < 0.01:
        return math.nan
    inside = waiting >= 0.95
    if inside.sum() >= max(3, 0.05 * len(values)):
        return float(values[inside].mean())
    if np.std(waiting) >= 0.1:
        slope, base = np.polyfit(waiting, values, 1)
        return max(float(slope + base), 0.0)
    mean, share = float(values.mean()), float(waiting.mean())
    if not spinning:
        return mean
    return max(mean - (1 - share), 0.0) / share  # one core waits for the card, spinning, in between


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _shm(samples: Samples) -> tuple[float, float]:
    """How full shared memory got, and when its trend over the last half fills it."""
    used, total = samples.columns.get("shm_used"), samples.columns.get("shm_total")
    if used is None or total is None or not np.nanmax(total) > 0:
        return math.nan, math.inf
    full = used / np.nanmax(total)
    late = samples.t >= (samples.t[0] + samples.t[-1]) / 2
    late &= ~np.isnan(full)
    if late.sum() < 4 or np.ptp(full[late]) < 0.02:
        return float(np.nanmax(full)), math.inf
    t, level = samples.t[late], full[late]
    slope, base = np.polyfit(t, level, 1)
    straight = np.corrcoef(t, level)[0, 1] > 0.9
    left = 1.0 - (slope * t[-1] + base)
    return float(np.nanmax(full)), float(left / slope) if straight and slope > 0 else math.inf
