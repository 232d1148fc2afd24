"""The metrics of a run: one table, of which endpoint, dashboard, alert rules and reference are made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.timeline import STATES
from stoker.report.devices import DeviceSummary
from stoker.report.readings import GPU, HOST, Reading
from stoker.report.summary import Summary
from stoker.report.totals import STEP_BUCKETS, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINDING_KINDS = (
    "healthy",
    "data_starvation",
    "h2d_copy",
    "collective_hang",
    "host_hang",
    "shm_pressure",
    "throttling",
    "precision",
    "launch_bound",
    "host_sync",
    "checkpoint_stall",
    "memory_pressure",
    "straggler",
    "communication_bound",
)
Point = tuple[str, tuple[str, ...], float]  # suffix of the name, label values, value
Read = Callable[[Summary, Totals], Iterable[Point]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One metric. Every series also has the label `job`. `row` is where a dashboard shows it."""

    name: str
    kind: str  # counter, gauge or histogram
    labels: tuple[str, ...]
    unit: str
    help: str
    row: str
    read: Read


def expose(summary: Summary, totals: Totals) -> str:
    """All metrics in Prometheus' text format."""
    return "".join(line for metric in METRICS for line in _lines(metric, summary, totals))


def _lines(metric: Metric, summary: Summary, totals: Totals) -> Iterator[str]:
    points = [point for point in metric.read(summary, totals) if math.isfinite(point[2])]
    if not points:
        return
    yield f"# HELP {metric.name} {_escaped(metric.help)}\n"
    yield f"# TYPE {metric.name} {metric.kind}\n"
    for suffix, values, value in points:
        names = (*metric.labels, "le") if suffix == "_bucket" else metric.labels
        labels = zip(("job", *names), (summary.title, *values), strict=True)
        said = ",".join(f'{name}="{_quoted(text)}"' for name, text in labels)
        yield f"{metric.name}{suffix}{{{said}}} {float(value)!r}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")


def _quoted(text: str) -> str:
    return _escaped(text).replace('"', r"\"")


# --- where values come from -----------------------------------------------------------------------


def _wall(summary: Summary, totals: Totals) -> Iterator[Point]:
    for labels, rank in totals.ranks():
        yield from (("", (*labels, state), rank.state_s[i]) for i, state in enumerate(STATES))


def _steps(summary: Summary, totals: Totals) -> Iterator[Point]:
    for labels, rank in totals.ranks():
        counts = np.cumsum(rank.step_counts)
        for bound, count in zip((*map(str, STEP_BUCKETS), "+Inf"), counts, strict=True):
            yield "_bucket", (*labels, bound), count
        yield "_sum", labels, rank.step_s
        yield "_count", labels, counts[-1]


def _tokens(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", labels, rank.tokens) for labels, rank in totals.ranks())


def _last_step(summary: Summary, totals: Totals) -> Iterator[Point]:
    begin = summary.started + summary.dropped_s
    return (("", (str(rank.rank), rank.node), begin + rank.steps.last_t) for rank in summary.ranks)


def _own(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", (str(rank.rank), rank.node), rank.own_s) for rank in summary.ranks)


def _active(summary: Summary, totals: Totals) -> Iterator[Point]:
    found = {finding.kind for finding in summary.findings}
    return (("", (kind,), float(kind in found)) for kind in FINDING_KINDS)


def _cost(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", (kind,), totals.cost_s.get(kind, 0.0)) for kind in FINDING_KINDS if kind != "healthy")


def _mfu(summary: Summary, totals: Totals) -> Iterator[Point]:
    yield "", (), summary.mfu


def _running(summary: Summary, totals: Totals) -> Iterator[Point]:
    yield "", (), float(summary.running)


def _device(gpu: DeviceSummary) -> tuple[str, ...]:
    return (gpu.node, str(gpu.index))


def _gpu_limit(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", _device(gpu), gpu.power_limit_w) for gpu in summary.gpus)


def _gpu_memory(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", _device(gpu), gpu.memory_bytes) for gpu in summary.gpus)


def _cores(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", (host.node,), host.cores) for host in summary.hosts)


def _gpu_reading(name: str) -> Read:
    def read(summary: Summary, totals: Totals) -> Iterator[Point]:
        return (("", _device(gpu), series.last) for gpu in summary.gpus if (series := gpu.read(name)))

    return read


def _host_reading(name: str) -> Read:
    def read(summary: Summary, totals: Totals) -> Iterator[Point]:
        return (("", (host.node,), series.last) for host in summary.hosts if (series := host.read(name)))

    return read


def _gauge(name: str, labels: tuple[str, ...], unit: str, row: str, help: str, read: Read) -> Metric:
    return Metric(name=name, kind="gauge", labels=labels, unit=unit, help=help, row=row, read=read)


def _of_gpu(reading: Reading) -> Metric:
    name = f"stoker_gpu_{reading.name}_{reading.unit}"
    return _gauge(name, ("node", "gpu"), reading.unit, "GPU", reading.help, _gpu_reading(reading.name))


def _of_host(reading: Reading) -> Metric:
    name = f"stoker_host_{reading.name}_{reading.unit}"
    return _gauge(name, ("node",), reading.unit, "Host", reading.help, _host_reading(reading.name))


METRICS = (
    Metric(
        name="stoker_wall_seconds_total",
        kind="counter",
        labels=("rank", "node", "state"),
        unit="seconds",
        help="Wall time of a rank by what it was spent on; all states together are the run's time.",
        row="Time",
        read=_wall,
    ),
    Metric(
        name="stoker_step_seconds",
        kind="histogram",
        labels=("rank", "node"),
        unit="seconds",
        help="How long finished steps took.",
        row="Steps",
        read=_steps,
    ),
    Metric(
        name="stoker_step_tokens_total",
        kind="counter",
        labels=("rank", "node"),
        unit="tokens",
        help="Tokens of finished steps, where they can be known.",
        row="Steps",
        read=_tokens,
    ),
    _gauge(
        "stoker_step_own_seconds",
        ("rank", "node"),
        "seconds",
        "Steps",
        "What a middling step takes a rank without waiting for others: the latest rank has most.",
        _own,
    ),
    _gauge(
        "stoker_last_step_timestamp_seconds",
        ("rank", "node"),
        "timestamp",
        "Steps",
        "When the last step ended, in seconds since 1970.",
        _last_step,
    ),
    _gauge("stoker_mfu_ratio", (), "ratio", "Steps", "FLOPs against the cards' dense bf16 peak.", _mfu),
    _gauge("stoker_running", (), "bool", "Time", "1 while the observed command runs.", _running),
    _gauge(
        "stoker_finding_active", ("kind",), "bool", "Findings", "1 while the run has this finding.", _active
    ),
    Metric(
        name="stoker_finding_cost_gpu_seconds_total",
        kind="counter",
        labels=("kind",),
        unit="seconds",
        help="GPU time a finding has cost so far.",
        row="Findings",
        read=_cost,
    ),
    *(_of_gpu(reading) for reading in GPU),
    _gauge("stoker_gpu_power_limit_watts", ("node", "gpu"), "watts", "GPU", "Power limit.", _gpu_limit),
    _gauge("stoker_gpu_memory_size_bytes", ("node", "gpu"), "bytes", "GPU", "Device memory.", _gpu_memory),
    *(_of_host(reading) for reading in HOST),
    _gauge(
        "stoker_host_cores", ("node",), "cores", "Host", "Cores the job may use, by mask and quota.", _cores
    ),
)
