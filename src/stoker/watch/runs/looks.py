"""Deep looks of a watched run, read back: each is a small trace with the window it was taken in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from stoker.errors import UnreadableError
from stoker.recording import Activity, Steps, kept
from stoker.watch.runs.kineto import HOST, read_trace
from stoker.watch.runs.profiled import activity_of


def read_looks(folder: Path, key: str, *, shift_s: float) -> tuple[Activity, ...]:
    """The looks of one process, in order; one that is torn is left out."""
    found = [_look(path) for path in folder.glob(f"look-{key}.*.json.gz")]
    return tuple(
        sorted((one.moved(shift_s) for one in found if one is not None), key=lambda one: one.start_s)
    )


def uncounted(steps: Steps, looks: tuple[Activity, ...]) -> Steps:
    """The steps without those that a look made slower."""
    apart = np.ones(len(steps.end), bool)
    for look in looks:
        apart &= (steps.end <= look.start_s) | (steps.start >= look.end_s)
    return kept(steps, apart)


def _look(path: Path) -> Activity | None:
    try:
        trace = read_trace(path)
        window = trace.facts["window"]
        start_s, end_s = float(window["start"]), float(window["end"])
    except (UnreadableError, KeyError, TypeError, ValueError):
        return None
    origin_s = trace.origin_us * 1e-6
    if len(trace.card.start):
        card = trace.card
    else:  # no card: what torch computed on the host stands in for it
        rows = trace.host.kept(trace.host.what == HOST.index("op"))
        card = replace(rows, what=np.zeros(len(rows.start), np.uint8))
    seen = activity_of(trace, card, trace.host, start_s - origin_s, end_s - origin_s)
    return seen.moved(origin_s)
