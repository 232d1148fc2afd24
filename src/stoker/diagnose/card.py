"""GPU features: what the cards did, as numbers over the run. Unknown is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stoker.gpus import SLOWDOWNS, Peaks, peaks_of
from stoker.recording import Floats, GpuRecord, Recording, Samples


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
        util_error=mean_of([_error(gpu.samples.columns.get("util")) for gpu in known]),
        sm=sm,
        tensor=_over(known, "any_tensor_util"),
        fp32=_over(known, "fp32_util"),
        dram=_over(known, "dram_bw_util"),
        memory_busy=_over(known, "mem_util"),
        power=mean_of(
            [_steady(gpu.samples, "power_w") / gpu.power_limit_w for gpu in known if gpu.power_limit_w > 0]
        ),
        working_util=min(util / busy_share, 100.0),
        working_sm=min(sm / busy_share, 100.0),
        idle_readings=mean_of([share_below(gpu.samples.columns.get("util"), below=10.0) for gpu in known]),
        pcie_rx_gb_s=_over(known, "pcie_rx_mib") * 2**20 / 1e9,
        capped=mean_of([_flagged(gpu.samples, 4) for gpu in known]),
        slowed=slowed,
        clock=clock,
        clock_mean=mean_of([_busy_clock(gpu) for gpu in known]),
        temp_c=_over(known, "temp_c"),
        memory_peak=max(_memory_peak(gpu) for gpu in known),
        memory_swing=swing,
        memory_turns=turns,
    )


def _over(gpus: list[GpuRecord], name: str) -> float:
    return mean_of([_steady(gpu.samples, name) for gpu in gpus])


def _steady(samples: Samples, name: str) -> float:
    """The mean without the first second, which still tells of the time before the recording."""
    column = samples.columns.get(name)
    if column is None:
        return math.nan
    late = column[samples.t > samples.t[0] + 1.0] if len(column) > 20 else column
    return mean_of(late.tolist())


def _error(column: Floats | None) -> float:
    """The standard error of a column's mean: few readings of a card that swings say little."""
    if column is None or np.isfinite(column).sum() < 2:
        return math.nan
    return float(np.nanstd(column) / math.sqrt(np.isfinite(column).sum()))


def mean_of(values: list[float]) -> float:
    known = [value for value in values if not math.isnan(value)]
    return sum(known) / len(known) if known else math.nan


def share_below(column: Floats | None, *, below: float) -> float:
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
    return mean_of(clock[slowed].tolist()) / best if best else math.nan


def _busy_clock(gpu: GpuRecord) -> float:
    clock, peaks = gpu.samples.columns.get("sm_mhz"), peaks_of(gpu.name)
    if clock is None or peaks is None:
        return math.nan
    return mean_of(clock[_busy(gpu.samples)].tolist()) / peaks.boost_mhz


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
