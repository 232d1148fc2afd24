"""Measurements that replace guesses: of a recorded run, or of a benchmark's result.

Each reader gives values of a job by their names, and says where they came from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.plan.documents import read_document
from stoker.plan.job import FIELDS
from stoker.recording import KINDS, RankRecord, Recording


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Values of a job, and where they were measured. `machines` is what it was measured on: a few minutes on
    one node say nothing against the 16 that a job is to have."""

    source: str
    values: dict[str, Any]  # of any kind a job has
    machines: dict[str, int] = field(default_factory=dict)


def read_measured(path: Path) -> Measured:
    """A folder or JSON lines are a recorded run, another file the JSON of a result."""
    if path.is_dir() or path.suffix == ".jsonl":
        from stoker.watch.runs import read_recording

        return of_recording(read_recording(path), source=str(path))
    return of_result(read_document(path), source=str(path))


def of_recording(recording: Recording, *, source: str) -> Measured:
    """The undisturbed step and what a GPU read, medians over ranks; waits for data are not the step's."""
    ranks = [rank for rank in recording.ranks if len(rank.steps.number) > 1]
    if not ranks:
        raise UsageError(f"{source} has no two steps to measure", hint="record a longer run")
    step = float(np.median([_step_s(rank) for rank in ranks]))
    read = float(np.median([_read_bytes(rank) for rank in ranks]))
    values: dict[str, Any] = {"step": step}
    if read > 0:
        values["read_rate"] = read / step
    return Measured(source=source, values=values, machines=_machines(recording, node=ranks[0].node))


def _machines(recording: Recording, *, node: str) -> dict[str, int]:
    found: dict[str, int] = {}
    if gpus := sum(gpu.node == node for gpu in recording.gpus):
        found.update(gpus_per_node=gpus, nodes=len({gpu.node for gpu in recording.gpus}))
    if cores := [host.cpus for host in recording.hosts]:
        quota = [host.quota_cores for host in recording.hosts if math.isfinite(host.quota_cores)]
        found["cores"] = int(min([*cores, *quota]))
    return found


def of_result(result: Mapping[str, Any], *, source: str) -> Measured:
    """Values under "measured", or a result of benchmarks/ that is known here."""
    if isinstance(result.get("measured"), dict):
        unknown = set(result["measured"]) - set(FIELDS)
        if unknown:
            raise UsageError(
                f"{source}: {min(unknown)} is nothing a job has", hint=f"use {', '.join(FIELDS)}"
            )
        return Measured(source=source, values=dict(result["measured"]))
    result = _newest(result)
    for read in _RESULTS:
        with suppress(KeyError, TypeError, ValueError):
            return Measured(source=source, values=read(result))
    raise UsageError(
        f"{source} is no result that is known here",
        hint='give a run folder, a result of gpu_feed.py, or {"measured": {"step": 0.5}}',
    )


def _step_s(rank: RankRecord) -> float:
    """A step less what it waited for data; the first is for warming up."""
    lengths = (rank.steps.end - rank.steps.start)[1:]
    waited = _per_step(rank, rank.spans.end - rank.spans.start)[1:]
    return float(np.median(np.maximum(lengths - waited, 1e-9)))


def _read_bytes(rank: RankRecord) -> float:
    return float(np.median(_per_step(rank, rank.spans.bytes.astype(np.float64))))


def _per_step(rank: RankRecord, values: np.ndarray[Any, np.dtype[np.float64]]) -> Any:
    """Sums of the data spans' values, a step each."""
    data = (rank.spans.kind == KINDS.index("data")) & (rank.spans.step >= 0)
    at = np.searchsorted(rank.steps.number, rank.spans.step[data])
    inside = at < len(rank.steps.number)
    return np.bincount(at[inside], values[data][inside], minlength=len(rank.steps.number))


def _newest(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Benchmarks keep every run: the last is the newest."""
    with suppress(KeyError, TypeError, IndexError):
        return dict(result["runs"][-1]["report"])
    return result


def _gpu_feed(result: Mapping[str, Any]) -> dict[str, Any]:
    """benchmarks/gpu_feed.py: what the disk gives, and what one card takes from pinned memory."""
    paths = result["paths"]
    disk = float(np.median(paths["disk"]["direct_ceiling_gb_s"])) * 1e9
    return {"nvme_rate": disk, "snapshot_rate": float(paths["pinned_copy_gb_s"]) * 1e9}


_RESULTS: tuple[Callable[[Mapping[str, Any]], dict[str, Any]], ...] = (_gpu_feed,)
