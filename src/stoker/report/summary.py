"""The summary of a run: the one thing all surfaces show, so that they cannot disagree.

`summarise` is where a recording and its findings come together; nothing below it reads a recording.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from stoker.findings import Finding
from stoker.recording import Floats, Recording
from stoker.report.lanes import STATES, Lane, lanes_of
from stoker.report.pace import Pace, pace_of_job, pace_of_rank
from stoker.report.readings import GPU, HOST, Reading
from stoker.report.series import Series, bin_edges, series_of

TIMELINE_BINS = 300  # a column of the timeline is then about three pixels wide
TIMELINE_STEPS = 4  # and lasts some steps, or it would show which of their phases it happened to meet
STEP_POINTS = 1000
_NOT_FACTS = ("started", "dropped_s", "missing")  # shown elsewhere


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """One process: seconds by state (in the order of STATES), its steps, and how late it is."""

    rank: int
    node: str
    gpu: int | None
    lane: Lane
    state_s: tuple[float, ...]
    steps: Pace
    step_end: Floats  # each finished step: when it ended, how long it took, its tokens
    step_s: Floats
    step_tokens: Floats
    own_s: float  # seconds of a step that were not spent waiting for other ranks
    late_s: float  # by how much own_s exceeds the median rank's


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceSummary:
    """A card or a host: what it is and what was read of it, one series per reading that was taken."""

    node: str
    index: int  # -1: a host
    name: str
    power_limit_w: float
    memory_bytes: float
    cores: float
    series: tuple[Series, ...]

    def read(self, name: str) -> Series | None:
        """A reading by its name; None where it was never taken."""
        return next((series for series in self.series if series.name == name), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Shares of all ranks' time by state, bin by bin: `share[state, bin]`, each column sums to 1."""

    edges: Floats
    share: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An event worth a mark on the timeline."""

    t: float
    rank: int
    what: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Everything a surface shows."""

    title: str
    wall_s: float
    dropped_s: float  # time before `wall_s` began that was recorded but has been overwritten since
    started: float  # when the run began in seconds since 1970, NaN where unknown
    ended: str
    gpu_count: int
    price: float | None  # dollars for an hour of one GPU
    findings: tuple[Finding, ...]  # worst first; the first is the verdict
    state_s: tuple[float, ...]  # seconds by state, mean over ranks: they sum to wall_s
    timeline: Timeline
    steps: Pace
    step_state_s: tuple[float, ...]  # what a mean step is made of, by state
    step_times: Series
    ranks: tuple[RankSummary, ...]
    gpus: tuple[DeviceSummary, ...]
    hosts: tuple[DeviceSummary, ...]
    marks: tuple[Mark, ...]
    missing: tuple[str, ...]  # what could not be seen of the run, in sentences
    facts: tuple[tuple[str, str], ...]

    @property
    def running(self) -> bool:
        return self.ended == "running"

    @property
    def verdict(self) -> Finding | None:
        return self.findings[0] if self.findings else None

    def dollars(self, finding: Finding) -> float | None:
        """What a finding costs in money; None without a price."""
        return None if self.price is None else finding.gpu_seconds / 3600 * self.price


def summarise(recording: Recording, findings: Sequence[Finding], *, price: float | None = None) -> Summary:
    """Bring a recording and its findings into what surfaces show."""
    lanes = lanes_of(recording)
    ranks = _ranks(recording, lanes)
    steps = pace_of_job([rank.steps for rank in ranks])
    edges = _timeline_edges(recording.wall_s, steps.median_s)
    longest = max((rank.steps for rank in recording.ranks), key=lambda steps: len(steps.end), default=None)
    return Summary(
        title=recording.title,
        wall_s=recording.wall_s,
        dropped_s=float(recording.facts.get("dropped_s", 0.0)),
        started=float(recording.facts.get("started", math.nan)),
        ended=recording.ended,
        gpu_count=len(recording.gpus),
        price=price,
        findings=tuple(findings),
        state_s=_mean_states(lanes),
        timeline=Timeline(edges=edges, share=_shares(lanes, edges)),
        steps=steps,
        step_state_s=_step_states(recording, lanes),
        step_times=series_of(
            "step",
            unit="seconds",
            # A step's length from its start to its end: a long one is a plateau.
            t=np.stack([longest.start, longest.end], axis=1).ravel() if longest else np.empty(0),
            values=np.repeat(longest.end - longest.start, 2) if longest else np.empty(0),
            edges=bin_edges(recording.wall_s, STEP_POINTS),
        ),
        ranks=ranks,
        gpus=_gpus(recording),
        hosts=_hosts(recording),
        marks=_marks(recording),
        missing=tuple(map(str, recording.facts.get("missing", ()))),
        facts=tuple((key, _plain(value)) for key, value in recording.facts.items() if key not in _NOT_FACTS),
    )


# --- ranks and their steps ------------------------------------------------------------------------


def _ranks(recording: Recording, lanes: Sequence[Lane]) -> tuple[RankSummary, ...]:
    own = [
        _own_s(lane, record.steps.start, record.steps.end)
        for lane, record in zip(lanes, recording.ranks, strict=True)
    ]
    middle = float(np.nanmedian(own)) if np.isfinite(own).any() else math.nan
    return tuple(
        RankSummary(
            rank=record.rank,
            node=record.node,
            gpu=record.gpu,
            lane=lane,
            state_s=tuple(map(float, lane.seconds_by_state())),
            steps=pace_of_rank(record.steps),
            step_end=record.steps.end,
            step_s=record.steps.end - record.steps.start,
            step_tokens=record.steps.tokens,
            own_s=mine,
            late_s=max(0.0, mine - middle) if math.isfinite(mine) else math.nan,
        )
        for record, lane, mine in zip(recording.ranks, lanes, own, strict=True)
    )


def _own_s(lane: Lane, start: Floats, end: Floats) -> float:
    """Seconds of a middling step that were a rank's own: whoever has most, the others wait for."""
    if not len(end):
        return math.nan
    waiting = STATES.index("collective")
    waited = lane.elapsed(end)[waiting] - lane.elapsed(start)[waiting]
    return float(np.median(end - start - waited))


# --- states ---------------------------------------------------------------------------------------


def _mean_states(lanes: Sequence[Lane]) -> tuple[float, ...]:
    if not lanes:
        return (0.0,) * len(STATES)
    return tuple(map(float, np.mean([lane.seconds_by_state() for lane in lanes], axis=0)))


def _timeline_edges(wall_s: float, step_s: float) -> Floats:
    columns = wall_s / (TIMELINE_STEPS * step_s) if step_s > 0 else TIMELINE_BINS
    return bin_edges(wall_s, int(min(TIMELINE_BINS, max(20, columns))))


def _shares(lanes: Sequence[Lane], edges: Floats) -> Floats:
    spent = sum(
        (np.diff(lane.elapsed(edges), axis=1) for lane in lanes), np.zeros((len(STATES), len(edges) - 1))
    )
    total = spent.sum(axis=0)
    share: Floats = np.divide(spent, total, out=np.zeros_like(spent), where=total > 0)
    return share


def _step_states(recording: Recording, lanes: Sequence[Lane]) -> tuple[float, ...]:
    """Seconds a mean step spends in each state, mean over the ranks that stepped."""
    parts: list[Floats] = []
    for record, lane in zip(recording.ranks, lanes, strict=True):
        if len(record.steps.end):
            within = lane.elapsed(record.steps.end) - lane.elapsed(record.steps.start)
            parts.append(within.mean(axis=1))
    return tuple(map(float, np.mean(parts, axis=0))) if parts else (0.0,) * len(STATES)


# --- devices, events, facts -----------------------------------------------------------------------


def _gpus(recording: Recording) -> tuple[DeviceSummary, ...]:
    edges = bin_edges(recording.wall_s, _points(len(recording.gpus)))
    return tuple(
        DeviceSummary(
            node=gpu.node,
            index=gpu.index,
            name=gpu.name,
            power_limit_w=gpu.power_limit_w,
            memory_bytes=float(gpu.memory_bytes),
            cores=math.nan,
            series=_readings(GPU, gpu.samples.t, gpu.samples.columns, edges),
        )
        for gpu in recording.gpus
    )


def _hosts(recording: Recording) -> tuple[DeviceSummary, ...]:
    edges = bin_edges(recording.wall_s, _points(len(recording.hosts)))
    return tuple(
        DeviceSummary(
            node=host.node,
            index=-1,
            name=host.node,
            power_limit_w=math.nan,
            memory_bytes=math.nan,
            cores=min(float(host.cpus), host.quota_cores),
            series=_readings(HOST, host.samples.t, host.samples.columns, edges),
        )
        for host in recording.hosts
    )


def _points(devices: int) -> int:
    """Points of a series: fewer the more devices there are, so that a report of a cluster stays small."""
    return max(100, 1000 // max(1, devices))


def _readings(
    table: Iterable[Reading], t: Floats, columns: dict[str, Floats], edges: Floats
) -> tuple[Series, ...]:
    return tuple(
        series_of(
            reading.name, unit=reading.unit, t=t, values=columns[reading.column] * reading.scale, edges=edges
        )
        for reading in table
        if reading.column in columns and not np.isnan(columns[reading.column]).all()
    )


def _marks(recording: Recording) -> tuple[Mark, ...]:
    marks = (
        Mark(t=event.t, rank=record.rank, what=event.what, text=event.text)
        for record in recording.ranks
        for event in record.events
    )
    return tuple(sorted(marks, key=lambda mark: mark.t))


def _plain(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={_plain(item)}" for key, item in value.items())
    return str(value)
