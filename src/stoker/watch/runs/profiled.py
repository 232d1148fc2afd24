"""Profiler traces as a recording: one file, or one a rank, with the same spans and steps as a watched run.

The last step of a trace is left out, as HolisticTraceAnalysis does: the profiler stops in it, and what it has
queued may be cut off. What the host did is told by the profiler's events; where they overlap, the one that
holds the loop up owns the time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UnreadableError
from stoker.intervals import Intervals, merged
from stoker.recording import (
    KINDS,
    WORK,
    Activity,
    Floats,
    GpuRecord,
    Mask,
    RankRecord,
    Recording,
    Samples,
    Seen,
    Spans,
    Stacks,
    Steps,
)
from stoker.watch.runs.kineto import HOST, Columns, Trace, read_trace

LAUNCHING_S = 2e-4  # between two operators: Python on its way to the next one
BLOCKING_S = 2e-5  # a copy's call that lasts longer waits for the card
READINGS = 20  # of a card, made of its events
_STEP = re.compile(r"^ProfilerStep\s*#\s*(\d+)")
_OPTIMIZER = "Optimizer.step#"
# Who owns a moment that several claim, the first of all; annotations by name.
_NAMED = {
    "data": re.compile(
        r"^enumerate\(DataLoader\)|dataloader.*next|^\W*(data[ _]?load(er|ing)?|get_batch)\W*$", re.I
    ),
    "checkpoint": re.compile(r"save_checkpoint|torch\.save", re.I),
    "evaluation": re.compile(r"^\W*(eval(uation|uate)?|validation|validate)\W*$", re.I),
    "optimizer": re.compile(r"^Optimizer\.step#"),
    "collective": re.compile(r"^(gloo|mpi|ucc):"),
}  # fmt: skip
_OWNERS = ("h2d", "collective", "data", "checkpoint", "evaluation", "sync", "optimizer", "compute")
_SYNC = re.compile(r"Synchronize")
_COPY_CALL = re.compile(r"Memcpy")
_FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): (?P<function>.+)$")
_LIBRARY = re.compile(r"site-packages|dist-packages|/lib/python|^torch/|^(threading|runpy|contextlib)\.py")


def read_traces(paths: Sequence[Path]) -> Recording:
    """One recording of the traces of one job, a rank each."""
    traces = [read_trace(path) for path in paths]
    if _same_rank(traces):
        names = ", ".join(trace.path.name for trace in traces)
        raise UnreadableError(f"{names} are traces of the same rank", hint="give one trace a rank")
    return _together(traces)


def read_ranks(paths: Sequence[Path]) -> Recording | None:
    """The same, or None where two traces are of the same rank: then they are two runs."""
    traces = [read_trace(path) for path in paths]
    told = {trace.rank for trace in traces}
    return None if None in told or _same_rank(traces) else _together(traces)


def _together(traces: Sequence[Trace]) -> Recording:
    paths = [trace.path for trace in traces]
    ranks = _numbered(traces)
    parts = [_part(trace, rank) for trace, rank in zip(traces, ranks, strict=True)]
    shifts, said = _shifts(traces)
    begins = min(part.start_s + shift for part, shift in zip(parts, shifts, strict=True))
    moved = [shift - begins for shift in shifts]
    return Recording(
        title=paths[0].name if len(paths) == 1 else f"{paths[0].parent.name or 'traces'}",
        wall_s=max(part.end_s + by for part, by in zip(parts, moved, strict=True)),
        ended="",
        ranks=tuple(part.record.moved(by) for part, by in zip(parts, moved, strict=True)),
        gpus=tuple(_moved(card, by) for part, by in zip(parts, moved, strict=True) for card in part.cards),
        hosts=(),
        facts=_facts(traces, parts, said),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One rank's trace, in its own time."""

    start_s: float
    end_s: float
    record: RankRecord
    cards: tuple[GpuRecord, ...]


def _numbered(traces: Sequence[Trace]) -> list[int]:
    """The ranks that the traces name; where none does, as they were given."""
    told = [trace.rank for trace in traces]
    found = [rank for rank in told if rank is not None]
    return found if len(found) == len(traces) else list(range(len(traces)))


def _same_rank(traces: Sequence[Trace]) -> bool:
    told = [trace.rank for trace in traces if trace.rank is not None]
    return len(set(told)) < len(told)


def _shifts(traces: Sequence[Trace]) -> tuple[list[float], list[str]]:
    """By how much each trace is later than the first; traces that do not overlap are laid over each other."""
    began = [trace.origin_us * 1e-6 + _base_s(trace) for trace in traces]
    lasts = [max((float(one.end.max()) for one in (trace.card, trace.host) if len(one.end)), default=0.0)
             for trace in traces]  # fmt: skip
    if max(began) > min(start + length for start, length in zip(began, lasts, strict=True)):
        return [0.0] * len(traces), ["whether ranks were late: their traces do not overlap in time"]
    return [start - min(began) for start in began], []


def _base_s(trace: Trace) -> float:
    base = trace.facts.get("baseTimeNanoseconds")
    return base * 1e-9 if isinstance(base, (int, float)) else 0.0


# --- one rank -------------------------------------------------------------------------------------


def _part(trace: Trace, rank: int) -> _Part:
    card, host, steps = _whole_steps(trace)
    claims = _claims(trace, card, host)
    start_s, end_s = _window(card, host, steps)
    device = int(np.bincount(card.place).argmax()) if len(card.start) else None
    mine = card if device is None else card.kept(card.place == device)
    spans = _spans(claims, start_s, end_s)
    record = RankRecord(
        rank=rank,
        node="",
        gpu=None if device is None else rank,
        spans=spans,
        steps=steps,
        memory=Samples(t=np.zeros(0), columns={}),
        stacks=_stacks(trace, host, claims, start_s, end_s),
        looks=(activity_of(trace, mine, host, start_s, end_s),) if len(mine.start) else (),
    )
    cards = (_card(trace, mine, rank, device, start_s, end_s),) if device is not None else ()
    return _Part(start_s=start_s, end_s=end_s, record=record, cards=cards)


def _whole_steps(trace: Trace) -> tuple[Columns, Columns, Steps]:
    """The steps, without the last of several; of the card's work what was queued before it."""
    found = [(one, int(told[1])) for one, told in _annotations(trace, _STEP.match)]
    if not found:
        return trace.card, trace.host, _optimizer_steps(trace)
    at = np.array([one for one, _ in found])
    starts, ends = trace.host.start[at], trace.host.end[at]
    numbers = np.array([number for _, number in found], np.int64)
    # A thread each, or several traces in one: a step is named once.
    _, first = np.unique(numbers, return_index=True)
    order = first[np.argsort(starts[first], kind="stable")]
    starts, ends, numbers = starts[order], ends[order], numbers[order]
    if len(starts) == 1:
        return trace.card, trace.host, _steps(numbers, starts, ends)
    until = starts[-1]
    host = trace.host.kept(trace.host.start < until)
    card = trace.card.kept(np.isin(trace.card.link, host.link[host.what == HOST.index("runtime")]))
    return card, host, _steps(numbers[:-1], starts[:-1], np.minimum(ends[:-1], starts[1:]))


def _optimizer_steps(trace: Trace) -> Steps:
    """Without the profiler's own steps: from one optimizer step to the next."""
    at = [one for one, _ in _annotations(trace, lambda name: name.startswith(_OPTIMIZER))]
    ends = np.sort(trace.host.end[at]) if at else np.zeros(0)
    return _steps(np.arange(1, max(len(ends), 1), dtype=np.int64), ends[:-1], ends[1:])


def _steps(numbers: NDArray[np.int64], starts: Floats, ends: Floats) -> Steps:
    unknown = np.full(len(starts), np.nan)
    return Steps(number=numbers, start=starts, end=ends, tokens=unknown, flops=unknown)


def _annotations(trace: Trace, test: Callable[[str], Any]) -> list[tuple[int, Any]]:
    """Places of the annotations whose name passes, with what the test said."""
    told = {number: test(name) for number, name in enumerate(trace.names)}
    rows = np.flatnonzero(trace.host.what == HOST.index("annotation"))
    return [(int(row), told[int(trace.host.name[row])]) for row in rows if told[int(trace.host.name[row])]]


def _window(card: Columns, host: Columns, steps: Steps) -> tuple[float, float]:
    """From the first step, or the first thing of all, to the end of the last work that belongs to one."""
    first = steps.start[:1] if len(steps.start) else host.start[:1]
    last = steps.end[-1:] if len(steps.end) else np.array([host.end.max(initial=0.0)])
    starts = np.concatenate([first, card.start[:1]])
    return float(starts.min()), float(np.concatenate([last, [card.end.max(initial=0.0)]]).max())


# --- what the host did ----------------------------------------------------------------------------


def _claims(trace: Trace, card: Columns, host: Columns) -> dict[str, Intervals]:
    """Who claims which time, by kind of span."""
    kernels = _union(card, card.what == WORK.index("kernel"))
    claims = {
        "h2d": _union(card, card.what == WORK.index("h2d")).without(kernels),
        "collective": _union(card, card.what == WORK.index("collective")).without(kernels),
    }
    for kind, pattern in _NAMED.items():
        if kind not in claims or not len(claims[kind].start):
            claims[kind] = _union(host, _named(trace, host, pattern, "annotation"))
    calls = _named(trace, host, _SYNC, "runtime")
    copies = _named(trace, host, _COPY_CALL, "runtime") & (host.end - host.start > BLOCKING_S)
    claims["sync"] = _union(host, calls | copies)
    doing = np.isin(host.what, [HOST.index("op"), HOST.index("runtime")])
    claims["compute"] = merged(host.start[doing], host.end[doing], closing_s=LAUNCHING_S)
    return claims


def _union(rows: Columns, which: Mask) -> Intervals:
    return merged(rows.start[which], rows.end[which])


def _named(trace: Trace, host: Columns, pattern: re.Pattern[str], kind: str) -> Mask:
    names = [number for number, name in enumerate(trace.names) if pattern.search(name)]
    found: Mask = (host.what == HOST.index(kind)) & np.isin(host.name, names)
    return found


def _spans(claims: dict[str, Intervals], start_s: float, end_s: float) -> Spans:
    """Every moment to the first that claims it: spans that do not overlap."""
    taken = Intervals(np.zeros(0), np.zeros(0))
    rows: list[tuple[int, Intervals]] = []
    for kind in _OWNERS:
        free = claims[kind].clipped(start_s, end_s).without(taken)
        rows.append((KINDS.index(kind), free))
        taken = merged(np.concatenate([taken.start, free.start]), np.concatenate([taken.end, free.end]))
    kinds = np.concatenate([np.full(len(free.start), number, np.uint8) for number, free in rows])
    start, end = (np.concatenate([getattr(free, name) for _, free in rows]) for name in ("start", "end"))
    order = np.argsort(start, kind="stable")
    count = len(order)
    return Spans(
        kind=kinds[order],
        start=start[order],
        end=end[order],
        step=np.full(count, -1, np.int64),
        bytes=np.zeros(count, np.int64),
    )


def _stacks(
    trace: Trace, host: Columns, claims: dict[str, Intervals], start_s: float, end_s: float
) -> Stacks:
    """Where the program's own code was while nothing else claimed the time: from a trace made with_stack."""
    lines = {number: line for number, name in enumerate(trace.names) if (line := _own_line(name))}
    rows = np.flatnonzero((host.what == HOST.index("python")) & np.isin(host.name, list(lines)))
    if not len(rows):
        return Stacks()
    busy = [claims[kind] for kind in _OWNERS]
    taken = merged(np.concatenate([one.start for one in busy]), np.concatenate([one.end for one in busy]))
    free = taken.gaps(start_s, end_s)
    spent: dict[str, tuple[float, int]] = {}
    left = free
    # The innermost first: it began last.
    for row in rows[::-1]:
        mine = left.clipped(float(host.start[row]), float(host.end[row]))
        if mine.seconds > 0:
            line = lines[int(host.name[row])]
            seconds, count = spent.get(line, (0.0, 0))
            spent[line] = (seconds + mine.seconds, count + 1)
            left = left.without(mine)
    seen = tuple(
        Seen(inside="", what="other", line=line, seconds=seconds, looks=max(count, 5))
        for line, (seconds, count) in spent.items()
    )
    return Stacks(seconds=end_s - start_s, seen=seen, looks=sum(one.looks for one in seen))


def _own_line(name: str) -> str:
    """`train.py(12): get_batch` as `train.py:12 get_batch`, unless it is a library's."""
    found = _FRAME.match(name)
    if not found or _LIBRARY.search(found["file"]):
        return ""
    return f"{found['file']}:{found['line']} {found['function']}"


# --- what the card did ----------------------------------------------------------------------------


def activity_of(trace: Trace, card: Columns, host: Columns, start_s: float, end_s: float) -> Activity:
    """The card's events, each with the host's call that queued it."""
    calls = host.kept((host.what == HOST.index("runtime")) & (host.link > 0))
    calls = calls.kept(np.argsort(calls.link, kind="stable"))
    launched = np.full(len(card.start), np.nan)
    if len(calls.link):
        at = np.minimum(np.searchsorted(calls.link, card.link), len(calls.link) - 1)
        known = calls.link[at] == card.link
        launched[known] = calls.start[at[known]]
    return Activity(
        start_s=start_s,
        end_s=end_s,
        names=trace.names,
        name=card.name,
        kind=card.what,
        start=card.start,
        end=card.end,
        launched=launched,
        bytes=card.bytes,
    )


def _card(
    trace: Trace, card: Columns, rank: int, device: int | None, start_s: float, end_s: float
) -> GpuRecord:
    told = trace.facts.get("deviceProperties")
    cards = [one for one in told if isinstance(one, dict)] if isinstance(told, list) else []
    mine = next((one for one in cards if one.get("id") == device), cards[0] if cards else {})
    edges = np.linspace(start_s, end_s, READINGS + 1)
    busy = merged(card.start, card.end).within(edges[:-1], edges[1:]) / np.diff(edges)
    size = mine.get("totalGlobalMem")
    return GpuRecord(
        node="",
        index=rank,
        name=str(mine.get("name") or ""),
        power_limit_w=0.0,
        memory_bytes=size if isinstance(size, int) else 0,
        samples=Samples(t=edges[1:], columns={"util": 100 * busy}),
    )


def _moved(card: GpuRecord, by_s: float) -> GpuRecord:
    return GpuRecord(
        node=card.node,
        index=card.index,
        name=card.name,
        power_limit_w=card.power_limit_w,
        memory_bytes=card.memory_bytes,
        samples=Samples(t=card.samples.t + by_s, columns=card.samples.columns),
    )


def _facts(traces: Sequence[Trace], parts: Sequence[_Part], said: list[str]) -> dict[str, object]:
    missing = list(said)
    if not any(part.cards for part in parts):
        missing.append("the GPU: the profiler ran without CUDA activity")
    if not any(len(part.record.steps.end) for part in parts):
        missing.append("steps: call the profiler's step() after each")
    facts: dict[str, object] = {"profiler": "Kineto", "missing": missing}
    for trace in traces:
        told = trace.facts.get("distributedInfo")
        if isinstance(told, dict) and isinstance(told.get("world_size"), int):
            facts["world"] = told["world_size"]
            if told["world_size"] > len(traces):
                missing.append("the other ranks: time in collectives may be waiting for one that is late")
    return facts
