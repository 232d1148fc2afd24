"""Recordings on disk: the run folder that a watched job's processes write, or a flat file of JSON lines,
or a trace of torch's profiler.

    node-NODE-PID.json       one watcher: what it started, on which machine, how that ended
    host-NODE.rows           samples of the machine          gpu-NODE-INDEX.rows   samples of a card
    proc-NODE-PID.json       one training process: rank, card, loader, clock
    spans-NODE-PID.ring      its spans                       steps-NODE-PID.ring   its steps
    memory-NODE-PID.rows     its allocator                   events-NODE-PID.jsonl its events

Every file has one writer. Times in them are the writer's monotonic clock; the JSON files say by how much
it differs from the time of day.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stoker.errors import UsageError

if TYPE_CHECKING:
    from stoker.recording import Recording


def read_recording(run: Path | str) -> Recording:
    """A run folder, also while it is being written: all ranks and nodes on one clock; or a flat recording,
    or a trace of torch's profiler (a folder of them: one a rank)."""
    from stoker.watch.runs.flat import read_flat  # numpy, which a watched program may lack
    from stoker.watch.runs.gather import gather

    path = Path(run)
    if traces := traces_in(path):
        from stoker.watch.runs.profiled import read_traces

        return read_traces(traces)
    return gather(path) if path.is_dir() else read_flat(path)


def read_job(runs: Sequence[Path]) -> list[Recording]:
    """What the paths of a command line mean: one recording, or two to compare. Traces of different ranks are
    one job, of the same rank two."""
    traces = [traces_in(path) for path in runs]
    if len(runs) > 1 and all(traces):
        from stoker.watch.runs.profiled import read_ranks

        if one := read_ranks([path for some in traces for path in some]):
            return [one]
    if len(runs) > 2:
        raise UsageError(
            f"{len(runs)} recordings were given",
            hint="give one, two to compare, or the traces of a job's ranks",
        )
    return [read_recording(path) for path in runs]


def traces_in(path: Path) -> list[Path]:
    """The profiler's traces that a path means: itself, or those of a folder that holds no run of ours."""
    from stoker.watch.runs.traceevents import is_trace

    if path.is_file():
        return [path] if is_trace(path) else []
    if any(path.glob("node-*.json")):
        return []
    return sorted(one for one in (*path.glob("*.json"), *path.glob("*.json.gz")) if is_trace(one))
