"""Run summary: the one thing all surfaces show, so that they cannot disagree.

`summarise` is where a recording and its findings come together; nothing below it reads a recording.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from stoker.diagnose.activity import Worked, last_look
from stoker.diagnose.judged import from_first_step
from stoker.diagnose.ledger import Ledger, ledger
from stoker.diagnose.timeline import STATES, Timeline, timeline
from stoker.findings import Finding
from stoker.gpus import peaks_of
from stoker.recording import Floats, Recording, Steps
from stoker.report.devices import DeviceSummary, gpus_of, hosts_of
from stoker.report.pace import Pace, pace_of_job, pace_of_rank
from stoker.report.series import Series, bin_edges, series_of
from stoker.report.units import quantity

COLUMNS = 300  # of states over time: each is then about three pixels wide
COLUMN_STEPS = 4  # and lasts some steps, or it would show which of their phases it happened to meet
STEP_POINTS = 1000
_NOT_FACTS = ("started", "dropped_s", "missing", "unseen")  # shown elsewhere


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSummary:
    """One process: seconds by state (in the order of STATES), its steps, and how late it is."""

    rank: int
    node: str
    timeline: Timeline
    settled_t: float  # when its last span ended: what comes after may still turn out to belong to one
    state_s: tuple[float, ...]
    steps: Pace
    step_end: Floats  # each finished step: when it ended, how long it took, its tokens
    step_s: Floats
    step_tokens: Floats
    own_s: float  # seconds of a step that were not spent waiting for other ranks
    late_s: float  # by how much own_s exceeds the median rank's


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """How all ranks' time was spent, stretch by stretch: `share[state, stretch]`, each column sums to 1."""

    edges: Floats
    share: Floats


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """An event of one rank."""

    t: float
    rank: int
    what: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Everything a surface shows."""

    title: str
    wall_s: float
    judged_s: float  # of it what findings are shares of: without start-up, and what follows the program's end
    dropped_s: float  # time before `wall_s` began that was recorded but has been overwritten since
    started: float  # when the run began in seconds since 1970, NaN where unknown
    ended: str
    price: float | None  # dollars for an hour of one GPU
    findings: tuple[Finding, ...]  # worst first; the first is the verdict
    state_s: tuple[float, ...]  # seconds by state, mean over ranks: they sum to wall_s
    ledger: Ledger | None  # the cards' side: busy, and idle by what the host did; None where none was read
    worked: Worked | None  # what a profiler saw the card do; None where none looked
    over_time: Shares
    steps: Pace
    mfu: float  # of the cards' dense bf16 peak, NaN where unknown
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
    lines = [timeline(rank, wall_s=recording.wall_s, ended=recording.ended) for rank in recording.ranks]
    ranks = _ranks(recording, lines)
    steps = pace_of_job([rank.steps for rank in ranks])
    edges = _stretches(recording.wall_s, steps.median_s)
    return Summary(
        title=recording.title,
        wall_s=recording.wall_s,
        judged_s=from_first_step(recording)[0].wall_s,
        dropped_s=float(recording.facts.get("dropped_s", 0.0)),
        started=float(recording.facts.get("started", math.nan)),
        ended=recording.ended,
        price=price,
        findings=tuple(findings),
        state_s=_mean_states(lines),
        ledger=ledger(recording, tuple(lines)),
        worked=last_look(recording),
        over_time=Shares(edges=edges, share=_shares(lines, edges)),
        steps=steps,
        mfu=_mfu(recording, steps),
        step_state_s=_step_states(recording, lines),
        step_times=_step_times(recording),
        ranks=ranks,
        gpus=gpus_of(recording),
        hosts=hosts_of(recording),
        marks=_marks(recording),
        missing=tuple(map(str, recording.facts.get("missing", ()))),
        facts=tuple(fact(key, value) for key, value in recording.facts.items() if key not in _NOT_FACTS),
    )


def of_node(summary: Summary, node: str) -> Summary:
    """One node's part of a run; what is said of the whole job stays with the node of rank 0."""
    if not node:
        return summary
    first = [rank.node for rank in summary.ranks if rank.rank == 0]
    return replace(
        summary,
        findings=summary.findings if not first or node in first else (),
        ranks=tuple(rank for rank in summary.ranks if rank.node == node),
        gpus=tuple(gpu for gpu in summary.gpus if gpu.node == node),
        hosts=tuple(host for host in summary.hosts if host.node == node),
    )


# --- ranks ----------------------------------------------------------------------------------------


def _ranks(recording: Recording, lines: Sequence[Timeline]) -> tuple[RankSummary, ...]:
    records = recording.ranks
    own = [_own_s(line, record.steps) for line, record in zip(lines, records, strict=True)]
    middle = float(np.nanmedian(own)) if np.isfinite(own).any() else math.nan
    return tuple(
        RankSummary(
            rank=record.rank,
            node=record.node,
            timeline=line,
            settled_t=float(record.spans.end.max()) if len(record.spans.end) else 0.0,
            state_s=tuple(line.seconds().values()),
            steps=pace_of_rank(record.steps),
            step_end=record.steps.end,
            step_s=record.steps.end - record.steps.start,
            step_tokens=record.steps.tokens,
            own_s=mine,
            late_s=max(0.0, mine - middle) if math.isfinite(mine) else math.nan,
        )
        for record, line, mine in zip(records, lines, own, strict=True)
    )


def _own_s(line: Timeline, steps: Steps) -> float:
    """Seconds of a middling step that were a rank's own: whoever has most, the others wait for."""
    if not len(steps.end):
        return math.nan
    waited = line.within("collective", steps.start, steps.end)
    return float(np.median(steps.end - steps.start - waited))


def _mfu(recording: Recording, steps: Pace) -> float:
    peaks = [peaks_of(gpu.name) for gpu in recording.gpus]
    total = sum(peak.bf16 * 1e12 for peak in peaks if peak is not None)
    return steps.flops_per_s / total if total and None not in peaks else math.nan


# --- states ---------------------------------------------------------------------------------------


def seconds_within(line: Timeline, starts: Floats, ends: Floats) -> Floats:
    """Seconds of every state inside each window: `[state, window]`."""
    return np.stack([line.within(state, starts, ends) for state in STATES])


def _mean_states(lines: Sequence[Timeline]) -> tuple[float, ...]:
    if not lines:
        return (0.0,) * len(STATES)
    return tuple(map(float, np.mean([list(line.seconds().values()) for line in lines], axis=0)))


def _stretches(wall_s: float, step_s: float) -> Floats:
    columns = wall_s / (COLUMN_STEPS * step_s) if step_s > 0 else COLUMNS
    return bin_edges(wall_s, int(min(COLUMNS, max(20, columns))))


def _shares(lines: Sequence[Timeline], edges: Floats) -> Floats:
    nothing = np.zeros((len(STATES), len(edges) - 1))
    spent = sum((seconds_within(line, edges[:-1], edges[1:]) for line in lines), nothing)
    total = spent.sum(axis=0)
    share: Floats = np.divide(spent, total, out=np.zeros_like(spent), where=total > 0)
    return share


def _step_states(recording: Recording, lines: Sequence[Timeline]) -> tuple[float, ...]:
    """Seconds a mean step spends in each state, mean over the ranks that stepped."""
    parts = [
        seconds_within(line, record.steps.start, record.steps.end).mean(axis=1)
        for record, line in zip(recording.ranks, lines, strict=True)
        if len(record.steps.end)
    ]
    return tuple(map(float, np.mean(parts, axis=0))) if parts else (0.0,) * len(STATES)


def _step_times(recording: Recording) -> Series:
    """How long steps took, of the rank with most: read where each ended and in all stretches it filled."""
    edges = bin_edges(recording.wall_s, STEP_POINTS)
    longest = max((rank.steps for rank in recording.ranks), key=lambda steps: len(steps.end), default=None)
    if longest is None or not len(longest.end):
        return series_of("step", unit="seconds", t=np.empty(0), values=np.empty(0), edges=edges)
    middles = (edges[:-1] + edges[1:]) / 2
    within = middles[(middles > longest.start[0]) & (middles < longest.end[-1])]
    t = np.sort(np.concatenate([longest.end, within]))
    step = np.minimum(np.searchsorted(longest.end, t), len(longest.end) - 1)
    took = longest.end - longest.start
    series = series_of("step", unit="seconds", t=t, values=took[step], edges=edges)
    return replace(series, average=float(took.mean()))


# --- events and facts -----------------------------------------------------------------------------


def _marks(recording: Recording) -> tuple[Mark, ...]:
    marks = (
        Mark(t=event.t, rank=record.rank, what=event.what, text=event.text)
        for record in recording.ranks
        for event in record.events
    )
    return tuple(sorted(marks, key=lambda mark: mark.t))


def fact(key: str, value: object) -> tuple[str, str]:
    """Its name and value for people: a number in the unit that its name says, 140 GiB and 700 W."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        if key.endswith(_BYTES):
            return key.removesuffix("_bytes"), quantity(value, "bytes")
        for end, unit in _UNITS.items():
            if key.endswith(end):
                return key.removesuffix(end), quantity(value, unit)
    return key, _plain(value)


_BYTES = ("bytes", "mem_total", "memory", "memory_total", "shm_size")  # the last ones are of flat recordings
_UNITS = {"_w": "watts", "_s": "seconds"}


def _plain(value: object) -> str:
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return " ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key}={_plain(item)}" for key, item in value.items())
    return str(value)
