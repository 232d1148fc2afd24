"""Host features: what the machine did, over the run and while the loop waited for a batch. Unknown is NaN."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
    read_bytes_s: float  # by the job, from disks
    write_bytes_s: float
    reading: float  # share of samples in which anything was read
    read_bytes: float  # of one read
    remote_bytes_s: float  # from servers: the network, NFS, Lustre
    throttled: float  # share of time the cgroup was stopped
    steal: float  # cores
    delay: float  # share of time that what makes batches could run and did not get a core
    rank_delay: float  # the same of the trainers' own threads
    trainer_cpu: float  # cores the trainers' own threads use, mean
    beside: float  # cores that the other threads of the trainers use, all together
    loader_cores: float  # that the loader's workers use and would use if they got them
    workers: float  # how many loader workers were seen
    workers_running: float  # while the loop waits
    workers_blocked: float  # in D, on a disk or a server
    trainer_blocked: float  # share of samples
    shm_peak: float  # of its size
    shm_grew: float  # over the least seen, of its size
    shm_total: float
    shm_full_in_s: float  # by its trend; inf: never


def host(recording: Recording, line: Timeline | None) -> Host | None:
    """The busiest host's readings while the loop ran, or nothing where there are none."""
    known = [one for one in recording.hosts if len(one.samples.t)]
    if not known:
        return None
    one = max(known, key=lambda record: np.nan_to_num(mean_of(_busy_cores(record).tolist())))
    shm_peak, shm_grew, shm_full_in_s = _shm(one.samples)
    one = _while_looping(recording, one)
    samples, busy = one.samples, _busy_cores(one)
    trainers = max(sum(rank.node == one.node for rank in recording.ranks), 1)
    waiting = _waiting(samples, line)
    workers = samples.mean("workers")
    delay = ratio(samples.mean("workers_delay"), workers) if workers >= 0.5 else samples.mean("trainer_delay")
    return Host(
        cpus=one.cpus,
        allowed=min(float(one.cpus), one.quota_cores),
        quota=one.quota_cores,
        busy=mean_of(busy.tolist()),
        wait_busy=_wait_busy(samples, busy, waiting),
        others=_others(samples, busy),
        iowait=_iowait(samples, waiting) / 100 * one.cpus,
        read_bytes_s=_read_bytes_s(samples),
        write_bytes_s=samples.mean("disk_write"),
        reading=1.0 - share_below(samples.columns.get("disk_read"), below=1.0),
        read_bytes=_read_bytes(samples),
        remote_bytes_s=max(
            (samples.mean(name) for name in _REMOTE if name in samples.columns), default=math.nan
        ),
        throttled=samples.mean("throttled") / 100,
        steal=samples.mean("steal") / 100 * one.cpus,
        delay=delay,
        rank_delay=samples.mean("trainer_delay"),
        trainer_cpu=samples.mean("trainer_cpu"),
        beside=max(samples.mean("trainer_cores") - trainers * samples.mean("trainer_cpu"), 0.0),
        loader_cores=samples.mean("workers_cpu") + samples.mean("workers_delay"),
        workers=workers,
        workers_running=samples.mean("workers_running"),
        workers_blocked=samples.mean("workers_blocked"),
        trainer_blocked=samples.mean("trainer_blocked"),
        shm_peak=shm_peak,
        shm_grew=shm_grew,
        shm_total=samples.mean("shm_total"),
        shm_full_in_s=shm_full_in_s,
    )


_REMOTE = ("net_rx", "nfs_read", "lustre_read")


def _while_looping(recording: Recording, one: HostRecord) -> HostRecord:
    """The samples between the first step and the last: starting up is another story."""
    ranks = [rank for rank in recording.ranks if len(rank.steps.end)]
    if not ranks:
        return one
    begin, end = min(rank.steps.start[0] for rank in ranks), max(rank.steps.end[-1] for rank in ranks)
    t = one.samples.t
    kept = (np.concatenate([[0.0], t[:-1]]) >= begin) & (t <= end)
    if kept.sum() < 3:
        return one
    return replace(one, samples=one.samples.kept(kept))


def _wait_busy(samples: Samples, busy: Floats, waiting: Floats) -> float:
    """Cores at work on batches: the workers' and, in waits, the trainer's own; if unknown, anybody's."""
    if "trainer_cpu" not in samples.columns:
        return _while_waiting(busy, waiting)
    return max(samples.mean("workers_cpu"), 0.0) + _while_waiting(samples.columns["trainer_cpu"], waiting)


def _read_bytes_s(samples: Samples) -> float:
    """From disks; of a disk that others use too, what the job itself read."""
    own = samples.mean("trainer_disk") + max(samples.mean("workers_disk"), 0.0)
    whole = samples.mean("disk_read")
    return whole if math.isnan(own) else min(whole, own)


def _read_bytes(samples: Samples) -> float:
    """Of one read: the workers' own, or where those were not counted the disks'."""
    if samples.mean("workers_read_calls") > 1:
        return samples.mean("workers_read") / samples.mean("workers_read_calls")
    return ratio(samples.mean("disk_read"), samples.mean("disk_reads"))


def _iowait(samples: Samples, waiting: Floats) -> float:
    """Percent while the loop waits: a loader without workers reads then only. A trace of it is just noise."""
    mean, share = samples.mean("iowait"), float(waiting.mean()) if len(waiting) else 0.0
    return min(mean / share, 100.0) if share > 0.1 and mean > 0.5 else mean


def _others(samples: Samples, busy: Floats) -> float:
    """Cores that keep busy what is neither trainer nor worker."""
    if "trainer_cores" not in samples.columns:
        return math.nan
    known = [samples.columns[name] for name in ("workers_cpu", "trainer_cores") if name in samples.columns]
    return max(mean_of((busy - np.sum(known, axis=0)).tolist()), 0.0)


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
    first = samples.t[:1] - np.median(np.diff(samples.t)) if len(samples.t) > 1 else np.zeros(1)
    before = np.concatenate([np.maximum(first, 0.0), samples.t[:-1]])
    if line is None:
        return np.zeros(len(samples.t))
    shares: Floats = line.within("data", before, samples.t) / np.maximum(samples.t - before, 1e-9)
    return shares


def _while_waiting(values: Floats, waiting: Floats) -> float:
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
    return max(mean - (1 - share), 0.0) / share  # in between one core works, or waits for the card, spinning


def ratio(a: float, b: float) -> float:
    return a / b if b > 0 else math.nan


def _shm(samples: Samples) -> tuple[float, float, float]:
    """How full shared memory got, how much of that came meanwhile, and when its trend over the last half
    fills it."""
    used, total = samples.columns.get("shm_used"), samples.columns.get("shm_total")
    if used is None or total is None or not np.nanmax(total) >= 1:  # byte
        return math.nan, math.nan, math.inf
    full = used / np.nanmax(total)
    peak, grew = float(np.nanmax(full)), float(np.nanmax(full) - np.nanmin(full))
    late = samples.t >= (samples.t[0] + samples.t[-1]) / 2
    late &= ~np.isnan(full)
    if late.sum() < 4 or np.ptp(full[late]) < 0.02:
        return peak, grew, math.inf
    t, level = samples.t[late], full[late]
    slope, base = np.polyfit(t, level, 1)
    straight = np.corrcoef(t, level)[0, 1] > 0.9
    left = 1.0 - (slope * t[-1] + base)
    return peak, grew, float(left / slope) if straight and slope > 0 else math.inf
