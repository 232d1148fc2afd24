"""What the host did, over the run and while the loop waited for a batch. Unknown is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.card import mean_of, share_below
from stoker.diagnose.timeline import Timeline
from stoker.recording import Floats, HostRecord, Recording, Samples


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
        busy=mean_of(busy.tolist()),
        wait_busy=_while_waiting(busy if ours is None else ours, waiting, spinning=ours is None),
        others=math.nan if ours is None else max(mean_of((busy - ours).tolist()), 0.0),
        iowait=samples.mean("iowait") / 100 * one.cpus,
        read_bytes_s=samples.mean("disk_read"),
        write_bytes_s=samples.mean("disk_write"),
        reading=1.0 - share_below(samples.columns.get("disk_read"), below=1.0),
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
