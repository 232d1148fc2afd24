"""Recordings on disk: the run folder that a watched job's processes write, or a flat file of JSON lines.

    node-NODE-PID.json       one watcher: what it started, on which machine, how that ended
    host-NODE.rows           samples of the machine          gpu-NODE-INDEX.rows   samples of a card
    proc-NODE-PID.json       one training process: rank, card, loader, clock
    spans-NODE-PID.ring      its spans                       steps-NODE-PID.ring   its steps
    memory-NODE-PID.rows     its allocator                   events-NODE-PID.jsonl its events

Every file has one writer. Times in them are the writer's monotonic clock; the JSON files say by how much
it differs from the time of day.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stoker.recording import Recording


def read_recording(run: Path | str) -> Recording:
    """A run folder, also while it is being written: all ranks and nodes on one clock; or a flat recording."""
    from stoker.watch.runs.flat import read_flat  # numpy, which a watched program may lack
    from stoker.watch.runs.gather import gather

    path = Path(run)
    return gather(path) if path.is_dir() else read_flat(path)
