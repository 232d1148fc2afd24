"""Prometheus metrics of a run: one table makes endpoint, dashboard, alert rules and reference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from stoker.diagnose.rules import RULES
from stoker.diagnose.timeline import STATES
from stoker.formats.prometheus import head, sample
from stoker.report.devices import DeviceSummary
from stoker.report.readings import GPU, HOST, Reading
from stoker.report.summary import Summary
from stoker.report.totals import STEP_BUCKETS, Totals

FINDING_KINDS = ("healthy", *(rule.__name__ for rule in RULES))  # a rule is named after what it finds
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
    yield head(metric.name, kind=metric.kind, help=metric.help)
    for suffix, values, value in points:
        names = (*metric.labels, "le") if suffix == "_bucket" else metric.labels
        labels = zip(("job", *names), (summary.title, *values), strict=True)
        yield sample(metric.name + suffix, labels, float(value))


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


def _device(one: DeviceSummary) -> tuple[str, ...]:
    """A card's labels, or a host's."""
    return (one.node,) if one.index < 0 else (one.node, str(one.index))


def _gpu_limit(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", _device(gpu), gpu.power_limit_w) for gpu in summary.gpus)


def _gpu_memory(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", _device(gpu), gpu.memory_bytes) for gpu in summary.gpus)


def _cores(summary: Summary, totals: Totals) -> Iterator[Point]:
    return (("", _device(host), host.cores) for host in summary.hosts)


def _metric(
    name: str, labels: tuple[str, ...], unit: str, row: str, help: str, read: Read, kind: str = "gauge"
) -> Metric:
    return Metric(name=name, kind=kind, labels=labels, unit=unit, help=help, row=row, read=read)


def _of_device(reading: Reading, row: str, labels: tuple[str, ...]) -> Metric:
    """The last reading of every card, or of every host."""

    def read(summary: Summary, totals: Totals) -> Iterator[Point]:
        devices = summary.gpus if row == "GPU" else summary.hosts
        return (("", _device(one), series.last) for one in devices if (series := one.read(reading.name)))

    name = f"stoker_{row.lower()}_{reading.name}_{reading.unit}"
    return _metric(name, labels, reading.unit, row, reading.help, read)


_RANK, _GPU, _HOST = ("rank", "node"), ("node", "gpu"), ("node",)
_WALL = "Wall time of a rank by what it was spent on; all states together are the run's time."
_OWN = "What a middling step takes a rank without waiting for others: the latest rank has most."
_LAST = "When the last step ended, in seconds since 1970."
_TOKENS = "Tokens of finished steps, where they can be known."
_COST = "GPU time a finding has cost so far."
_ALLOWED = "Cores the job may use, by mask and quota."

METRICS = (
    _metric("stoker_wall_seconds_total", (*_RANK, "state"), "seconds", "Time", _WALL, _wall, "counter"),
    _metric(
        "stoker_step_seconds", _RANK, "seconds", "Steps", "How long finished steps took.", _steps, "histogram"
    ),
    _metric("stoker_step_tokens_total", _RANK, "tokens", "Steps", _TOKENS, _tokens, "counter"),
    _metric("stoker_step_own_seconds", _RANK, "seconds", "Steps", _OWN, _own),
    _metric("stoker_last_step_timestamp_seconds", _RANK, "timestamp", "Steps", _LAST, _last_step),
    _metric("stoker_mfu_ratio", (), "ratio", "Steps", "FLOPs against the cards' dense bf16 peak.", _mfu),
    _metric("stoker_running", (), "bool", "Time", "1 while the observed command runs.", _running),
    _metric(
        "stoker_finding_active", ("kind",), "bool", "Findings", "1 while the run has this finding.", _active
    ),
    _metric(
        "stoker_finding_cost_gpu_seconds_total", ("kind",), "seconds", "Findings", _COST, _cost, "counter"
    ),
    *(_of_device(reading, "GPU", _GPU) for reading in GPU),
    _metric("stoker_gpu_power_limit_watts", _GPU, "watts", "GPU", "Power limit.", _gpu_limit),
    _metric("stoker_gpu_memory_size_bytes", _GPU, "bytes", "GPU", "Device memory.", _gpu_memory),
    *(_of_device(reading, "Host", _HOST) for reading in HOST),
    _metric("stoker_host_cores", _HOST, "cores", "Host", _ALLOWED, _cores),
)
