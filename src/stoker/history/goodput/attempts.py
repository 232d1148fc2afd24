"""Attempts: the lives of a job's ranks, read out of run folders: what each did when, saved and restored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stoker.diagnose.timeline import Timeline, timeline
from stoker.recording import KINDS, RankRecord, Recording
from stoker.spans import FOLDER, NO_STEP, RESTORE, RESTORED
from stoker.watch.runs.columns import Ring, read_ring
from stoker.watch.runs.files import read_meta

_STARTUP = KINDS.index("startup")


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """The loop was held up from `start` to `end`; `step` is the program's, None where it did not tell."""

    start: float
    end: float
    step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Restore:
    """A checkpoint was loaded before the first step. `told`: a Checkpointer said which step, None being a
    fresh start; else somebody has called torch.load."""

    start: float
    end: float
    step: int | None
    told: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Life:
    """One process of one rank. Times are of its run, in seconds since that began."""

    rank: int
    start: float
    end: float
    line: Timeline
    steps: int
    last_step: float  # when its last step ended; `start` where it had none
    saves: tuple[Save, ...]
    restores: tuple[Restore, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One run folder: one submission of the job, which may have restarted its ranks itself."""

    run: str
    job: str  # what runs of one job share; empty where nothing says
    checkpoints: tuple[str, ...]  # folders restored from and saved to
    began: float  # in seconds since 1970
    wall_s: float
    unseen_s: float  # at the beginning: recorded, and overwritten since
    ended: str
    lives: tuple[Life, ...]


def read_attempts(folder: Path, recording: Recording) -> tuple[Attempt, ...]:
    """The attempt that a run folder is; none of a flat recording."""
    metas = [meta for path in sorted(folder.glob("node-*.json")) if (meta := read_meta(path))]
    if not metas:
        return ()
    dropped = float(recording.facts.get("dropped_s", 0.0))
    began = float(recording.facts.get("started", 0.0))
    told = list(_told(folder, metas, began=began + dropped))
    lives = [life for record in recording.ranks for life in _lives(record, recording, told)]
    folders = {name for one in told for name in one.folders}
    return (
        Attempt(
            run=str(folder.absolute()),
            job=next((str(meta["job"]) for meta in metas if meta.get("job")), ""),
            checkpoints=tuple(sorted(folders)),
            began=began,
            wall_s=dropped + recording.wall_s,
            unseen_s=dropped,
            ended=recording.ended,
            lives=tuple(lives),
        ),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Told:
    """What one process's ring says of its checkpoints."""

    rank: int
    folders: tuple[str, ...]
    saves: tuple[Save, ...]
    restores: tuple[Restore, ...]


def _told(folder: Path, watchers: Sequence[Mapping[str, Any]], *, began: float) -> Iterator[_Told]:
    metas = [meta for path in sorted(folder.glob("proc-*.json")) if "key" in (meta := read_meta(path))]
    # the first to tell a boot's clock is believed for all of it, as where recordings are gathered
    offsets = {m["clock"]["boot"]: float(m["clock"]["offset_s"]) for m in reversed([*watchers, *metas])}
    for meta in metas:
        ring = read_ring(folder / f"spans-{meta['key']}.ring")
        shift = offsets[meta["clock"]["boot"]] - began
        yield _Told(
            rank=int(meta["rank"]),
            folders=tuple(name.removeprefix(FOLDER) for name in ring.names if name.startswith(FOLDER)),
            saves=tuple(_saves(ring, shift)),
            restores=tuple(_restores(ring, shift)),
        )


def _saves(ring: Ring, shift: float) -> Iterator[Save]:
    """Every time the loop was held up by a save; of a Checkpointer's the step, which its commit names."""
    committed = {int(row["step"]) for row in _named(ring, "checkpoint commit")}
    for row in _named(ring, "checkpoint"):
        step = int(row["step"])
        yield Save(
            start=float(row["start"]) + shift,
            end=float(row["end"]) + shift,
            step=step if step in committed else None,
        )


def _restores(ring: Ring, shift: float) -> Iterator[Restore]:
    for name, told in ((RESTORED, True), (RESTORE, False)):
        for row in _named(ring, name):
            step = int(row["step"])
            yield Restore(
                start=float(row["start"]) + shift,
                end=float(row["end"]) + shift,
                step=step if told and step != NO_STEP else None,
                told=told,
            )


def _named(ring: Ring, name: str) -> Any:  # rows of numpy's, by their fields
    return ring.records[ring.records["what"] == ring.names.index(name)] if name in ring.names else ()


def _lives(record: RankRecord, recording: Recording, told: Sequence[_Told]) -> Iterator[Life]:
    """A rank's processes one after another: each begins with its start-up."""
    wall_s = recording.wall_s
    line = timeline(record, wall_s=wall_s, ended=recording.ended)
    begins = sorted({*record.spans.start[record.spans.kind == _STARTUP].tolist()} | {0.0})
    begins = [at for at in begins if not 0.0 < at < 1e-3]
    mine = [one for one in told if one.rank == record.rank]
    for start, end in zip(begins, [*begins[1:], wall_s], strict=True):
        within = (record.steps.end > start) & (record.steps.end <= end)
        ends = record.steps.end[within]
        first = float(record.steps.start[within][0]) if len(ends) else end
        end = _gone(record, max([start, *ends[-1:].tolist()]), end)
        saves = [one for some in mine for one in some.saves if start <= one.start < end]
        yield Life(
            rank=record.rank,
            start=start,
            end=end,
            line=line,
            steps=len(ends),
            last_step=float(ends[-1]) if len(ends) else start,
            saves=tuple(sorted(saves, key=lambda one: one.end)),
            restores=tuple(
                one
                for some in mine
                for one in some.restores
                if start <= one.start and one.end <= first + 1e-3
            ),
        )


def _gone(record: RankRecord, last: float, end: float) -> float:
    """When the process was seen to exit: its watcher ends a moment later, and is no part of the work."""
    return min([end, *(event.t for event in record.events if event.what == "exit" and last <= event.t)])


def same_job(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """Attempts that restart each other: of one job id, or with one checkpoint folder."""
    groups: list[list[Attempt]] = []
    for one in sorted(attempts, key=lambda one: one.began):
        joined = [group for group in groups if any(_alike(one, other) for other in group)]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([one, *(other for group in joined for other in group)], key=lambda a: a.began))
    return groups


def _alike(one: Attempt, other: Attempt) -> bool:
    if one.job and other.job:
        return one.job == other.job
    return bool({*one.checkpoints} & {*other.checkpoints})


def covered_s(spans: Sequence[tuple[float, float]]) -> float:
    """Seconds in any of these: a Checkpointer may itself call torch.load."""
    total, until = 0.0, -np.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return float(total)
