"""Trace merging: a run folder as one recording, every process and node, on the clock of the first watcher."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import UnreadableError
from stoker.recording import KINDS, GpuRecord, HostRecord, RankRecord, Recording, Spans, Steps, kept
from stoker.watch.runs.alive import runs_still
from stoker.watch.runs.clocks import skews
from stoker.watch.runs.columns import (
    as_spans,
    as_steps,
    loop_thread,
    read_events,
    read_ring,
    read_rows,
    read_stacks,
)  # fmt: skip
from stoker.watch.runs.files import VERSION, Clock, read_meta
from stoker.watch.runs.looks import read_looks, uncounted

_NOBODY = (
    "no training process attached: only the machine was observed. Steps, waits and lines are seen of "
    "programs that import torch; of JAX, TensorFlow and others cards, cores, disks, memory and the exit are"
)
FLOPS = "6 × params × tokens, an estimate"
_STARTUP = KINDS.index("startup")
Meta = dict[str, Any]  # the JSON of a meta file
Shifts = dict[str, float]  # by boot


@dataclass(frozen=True, kw_only=True, slots=True)
class _Process:
    """A training process as read, and what its ring had to drop."""

    meta: Meta
    record: RankRecord
    lost: int


def gather(folder: Path) -> Recording:
    """Read everything; what is not there yet is simply absent."""
    watchers = _metas(folder, "node")
    metas = _metas(folder, "proc")
    if not watchers and not metas:
        raise UnreadableError(f"{folder} holds no run", hint="give the folder that `stoker watch` named")
    began = min(meta["began"] for meta in watchers or metas)
    shifts = _shifts(watchers, metas, began)
    processes, shifts = _aligned([_process(folder, meta, shifts) for meta in metas], shifts)
    ranks = _ranks(processes)
    hosts, gpus = _machines(folder, watchers, shifts)
    running = [runs_still(meta, folder) for meta in watchers]
    wall_s = _wall_s(watchers, any(running), ranks, hosts, began, shifts)
    whole = Recording(
        title=watchers[0]["title"] if watchers else folder.name,
        wall_s=wall_s,
        ended=_ended(watchers, running),
        ranks=ranks,
        gpus=gpus,
        hosts=hosts,
        facts={
            "started": began,
            **_facts(
                watchers,
                processes,
                shifts,
                [*_unrecorded(folder, metas), *_beside(processes), *_looked(processes)],
            ),
        },
    )
    return _from_where_rings_begin(whole) if any(one.lost for one in processes) else whole


def _metas(folder: Path, kind: str) -> list[Meta]:
    """The meta files of this kind; without those that are torn, or are no such files."""
    found = [meta for path in sorted(folder.glob(f"{kind}-*.json")) if (meta := read_meta(path))]
    for meta in found:
        if meta.get("version", VERSION) != VERSION:
            raise UnreadableError(
                f"{folder} holds a run of version {meta['version']}, this stoker reads {VERSION}",
                hint="read it with the stoker that wrote it",
            )
    wanted = {"began", "clock", "node", "pid", *(("key", "rank") if kind == "proc" else ("title",))}
    whole = [meta for meta in found if wanted <= meta.keys()]
    return sorted(whole, key=lambda meta: float(meta["began"]))


def _unrecorded(folder: Path, metas: Sequence[Meta]) -> list[str]:
    """Why processes that have said something have no files."""
    known = {f"events-{meta['key']}.jsonl" for meta in metas}
    lost = [path for path in sorted(folder.glob("events-*.jsonl")) if path.name not in known]
    events = (event for path in lost for event in read_events(path, shift_s=0.0))
    told = {event.text for event in events if event.facts.get("hook") == "recording"}
    return [f"a process was not recorded: {text}" for text in sorted(told)]


def _shifts(watchers: Sequence[Meta], metas: Sequence[Meta], began: float) -> Shifts:
    """What to add to monotonic times for seconds since the run began. All of one boot share that clock; the
    time of day may have been set since, so the first to tell the difference is believed for all."""
    told = [(meta["clock"]["boot"], float(meta["clock"]["offset_s"])) for meta in (*watchers, *metas)]
    return {boot: offset_s - began for boot, offset_s in reversed(told)}


def _process(folder: Path, meta: Meta, shifts: Shifts) -> _Process:
    key, shift_s = meta["key"], shifts[meta["clock"]["boot"]]
    spans, steps = read_ring(folder / f"spans-{key}.ring"), read_ring(folder / f"steps-{key}.ring")
    looks = read_looks(folder, key, shift_s=shift_s)
    per_token = 6.0 * (meta.get("params") or np.nan)
    record = RankRecord(
        rank=meta["rank"],
        node=meta["node"],
        gpu=meta.get("gpu"),
        spans=as_spans(spans, thread=loop_thread(steps), shift_s=shift_s),
        steps=uncounted(as_steps(steps, spans, flops_per_token=per_token, shift_s=shift_s), looks),
        memory=read_rows(folder / f"memory-{key}.rows", shift_s=shift_s),
        events=read_events(folder / f"events-{key}.jsonl", shift_s=shift_s),
        stacks=read_stacks(folder / f"stacks-{key}.json"),
        looks=looks,
    )
    return _Process(meta=meta, record=record, lost=spans.lost)


def _aligned(processes: list[_Process], shifts: Shifts) -> tuple[list[_Process], Shifts]:
    """Clock skew between machines removed."""
    late_s = skews([(one.meta["clock"]["boot"], one.record.spans) for one in processes])
    moved = [
        replace(one, record=one.record.moved(-late_s.get(one.meta["clock"]["boot"], 0.0)))
        for one in processes
    ]
    return moved, {boot: shift_s - late_s.get(boot, 0.0) for boot, shift_s in shifts.items()}


def _ranks(processes: Sequence[_Process]) -> tuple[RankRecord, ...]:
    """One record a rank: of its processes those that trained, one after another where it was restarted."""
    return tuple(_one_rank(records) for _, records in sorted(_by_rank(processes).items()))


def _by_rank(processes: Iterable[_Process]) -> dict[int, list[RankRecord]]:
    found: dict[int, list[RankRecord]] = {}
    for one in processes:
        found.setdefault(one.record.rank, []).append(one.record)
    return found


def _beside(processes: Iterable[_Process]) -> list[str]:
    """Which ranks had several processes that trained at the same time."""
    found = []
    for rank, records in sorted(_by_rank(processes).items()):
        trained = [one for one in records if len(one.steps.end)]
        if left_out := len(trained) - len(_in_turn(trained)):
            found.append(
                f"{left_out} more that trained as rank {rank} at the same time: watch each by itself"
            )
    return found


def _looked(processes: Iterable[_Process]) -> list[str]:
    """The profiler slows down what it looks at."""
    looks = sum(len(one.record.looks) for one in processes)
    return [f"the usual pace of steps in {looks} deep looks, which is not counted"] if looks else []


def _in_turn(trained: Iterable[RankRecord]) -> list[RankRecord]:
    """Processes one after another; of those at the same time the one with most steps: as one rank they would
    have times that run to and fro."""
    chosen: list[RankRecord] = []
    for one in sorted(trained, key=lambda one: float(one.steps.start[0])):
        if chosen and one.steps.start[0] < chosen[-1].steps.end[-1]:
            chosen[-1] = max(chosen[-1], one, key=lambda one: len(one.steps.end))
        else:
            chosen.append(one)
    return chosen


def _one_rank(records: list[RankRecord]) -> RankRecord:
    trained = _in_turn(one for one in records if len(one.steps.end)) or records
    trained.sort(key=lambda one: float(one.spans.end[0]) if len(one.spans.end) else np.inf)
    ended = 0.0
    for one in trained:
        if len(one.spans.start) and one.spans.kind[0] == _STARTUP:
            # Until a process began its launcher was starting it; one put in another's place (exec) is as old.
            one.spans.start[0] = max(ended, one.spans.start[0]) if ended else 0.0
        ended = max([ended, *one.spans.end[-1:]])
    spans = _joined(Spans, [one.spans for one in trained])
    events = sorted((event for one in records for event in one.events), key=lambda event: event.t)
    return replace(
        trained[-1],
        spans=spans,
        steps=_joined(Steps, [one.steps for one in trained]),
        memory=trained[-1].memory,
        events=tuple(events),
    )


def _joined(kind: Any, parts: Sequence[Any]) -> Any:  # Spans or Steps: columns of equal length
    names = kind.__dataclass_fields__
    return kind(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})


# --- machines -------------------------------------------------------------------------------------


def _machines(
    folder: Path, watchers: Sequence[Meta], shifts: Shifts
) -> tuple[tuple[HostRecord, ...], tuple[GpuRecord, ...]]:
    """One host a node, whose samples one of its watchers took, and the cards that one saw."""
    hosts, gpus = [], []
    # A watcher that ended may have handed on to another: their samples are parts of the same files.
    for meta in {meta["node"]: meta for meta in watchers if meta.get("samples")}.values():
        shift_s = shifts[meta["clock"]["boot"]]
        hosts.append(_host(folder, meta, shift_s))
        gpus += [_gpu(folder, meta, card, shift_s) for card in meta.get("gpus", ())]
    return tuple(hosts), tuple(gpus)


def _host(folder: Path, meta: Meta, shift_s: float) -> HostRecord:
    quota = meta.get("quota_cores")
    return HostRecord(
        node=meta["node"],
        cpus=meta["cpus"],
        quota_cores=float("inf") if quota is None else quota,
        samples=read_rows(folder / f"host-{meta['node']}.rows", shift_s=shift_s),
    )


def _gpu(folder: Path, meta: Meta, card: Meta, shift_s: float) -> GpuRecord:
    path = folder / f"gpu-{meta['node']}-{card['index']}.rows"
    return GpuRecord(
        node=meta["node"],
        index=card["index"],
        name=card["name"],
        power_limit_w=card["power_limit_w"] or float("nan"),
        memory_bytes=card["memory_bytes"] or 0,
        samples=read_rows(path, shift_s=shift_s),
    )


# --- the whole ------------------------------------------------------------------------------------


def _wall_s(
    watchers: Sequence[Meta],
    running: bool,
    ranks: Iterable[RankRecord],
    hosts: Iterable[HostRecord],
    began: float,
    shifts: Shifts,
) -> float:
    """Until the last watcher ended; of one that still runs, until now; of a lost one, until the last span or
    sample."""
    ends = [meta["ended_at"] - began for meta in watchers if meta.get("ended_at")]
    if running:
        here_s = shifts.get(Clock.here().boot)
        ends.append(time.time() - began if here_s is None else time.monotonic() + here_s)
    if len(ends) < len(watchers) or not watchers:
        ends += [float(one.spans.end.max()) for one in ranks if len(one.spans.end)]
        ends += [float(one.samples.t[-1]) for one in hosts if len(one.samples.t)]
    return max(ends, default=0.0)


def _ended(watchers: Sequence[Meta], running: Sequence[bool]) -> str:
    """The worst end of all watchers."""
    ends = [
        meta.get("ended") or ("running" if runs else "lost")
        for meta, runs in zip(watchers, running, strict=True)
    ]
    bad = [end for end in ends if end not in ("exit 0", "running")]
    return (bad or sorted(ends, reverse=True) or [""])[0]


def _facts(
    watchers: Sequence[Meta], processes: Sequence[_Process], shifts: Shifts, unseen: list[str]
) -> Meta:
    facts: Meta = {}
    for meta in watchers[:1]:
        facts |= {name: meta[name] for name in ("argv", "hz") if name in meta}
    trained = [one.meta for one in processes if len(one.record.steps.end)] or [p.meta for p in processes]
    for meta in trained[:1]:
        names = ("torch", "python", "loader", "loaders", "losses", "threads", "params", "nccl_env", "world")
        facts |= {name: meta[name] for name in names if meta.get(name)}
        windows, shift_s = meta.get("what_if", ()), shifts[meta["clock"]["boot"]]
        facts |= {"what_if": [{**one, "at": one["at"] + shift_s} for one in windows]} if windows else {}
    if facts.get("params"):
        facts["flops"] = FLOPS
    facts |= _ending(watchers, shifts)
    missing = [line for meta in (*watchers, *trained) for line in meta.get("missing", ())] + unseen
    if watchers and not processes and not unseen:
        missing.append(_NOBODY)
    return {**facts, "missing": list(dict.fromkeys(missing))}


def _ending(watchers: Sequence[Meta], shifts: Shifts) -> Meta:
    """How the run ended badly, of several nodes as the first of them did; the time is the run's."""
    found = []
    for meta in watchers:
        told = meta.get("ending")
        if isinstance(told, dict):
            at = told.get("at")
            found.append({**told, "at": at + shifts[meta["clock"]["boot"]] if at else None})
    return {"ending": min(found, key=lambda one: one["at"] or float("inf"))} if found else {}


def _from_where_rings_begin(whole: Recording) -> Recording:
    """A ring that came round knows only the end of the run: the recording then begins where all do."""
    began = max(float(one.spans.start.min()) for one in whole.ranks if len(one.spans.start))
    return replace(
        whole,
        wall_s=whole.wall_s - began,
        ranks=tuple(_since(one, began).moved(-began) for one in whole.ranks),
        gpus=tuple(replace(one, samples=one.samples.since(began)) for one in whole.gpus),
        hosts=tuple(replace(one, samples=one.samples.since(began)) for one in whole.hosts),
        facts={**whole.facts, "dropped_s": began},
    )


def _since(record: RankRecord, began: float) -> RankRecord:
    return replace(
        record,
        spans=kept(record.spans, record.spans.start >= began),
        steps=kept(record.steps, record.steps.start >= began),
        memory=record.memory.kept(record.memory.t >= began),
        events=tuple(event for event in record.events if event.t >= began),
    )
