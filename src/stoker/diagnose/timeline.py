"""Where the wall time of a rank went: exclusive states that cover it from beginning to end.

Spans may nest (the inner takes its time from the outer) and overlap (the more specific kind wins); what no
span covers is start-up before the first step, stalled where it lasts far longer than a step, otherwise
unattributed. So the states always sum to the wall time.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.recording import KINDS, Floats, RankRecord, Spans, Steps

STATES = (
    "compute",
    "data",
    "copy",
    "collective",
    "checkpoint",
    "evaluation",
    "startup",
    "sync",
    "stalled",
    "unattributed",
)
_STATE_OF = {"h2d": "copy", "forward": "compute", "backward": "compute", "optimizer": "compute"}
_BY_KIND = np.array([STATES.index(_STATE_OF.get(kind, kind)) for kind in KINDS], np.uint8)

# A piece of time that nothing explains is a stall when it lasts this long and this many usual steps: shorter
# ones are Python between steps.
STALL_S = 2.0
STALL_STEPS = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """State `state[i]` from `edges[i]` to `edges[i + 1]`; edges run from 0 to the wall time."""

    edges: Floats
    state: NDArray[np.uint8]

    def seconds(self) -> dict[str, float]:
        """Seconds of every state; they sum to the wall time."""
        lengths = np.diff(self.edges)
        return {name: float(lengths[self.state == number].sum()) for number, name in enumerate(STATES)}

    def within(self, name: str, starts: Floats, ends: Floats) -> Floats:
        """Seconds of one state inside each of the given windows."""
        if len(self.edges) < 2:
            return np.zeros(len(starts))
        lengths = np.where(self.state == STATES.index(name), np.diff(self.edges), 0.0)
        sums = np.concatenate([[0.0], np.cumsum(lengths)])
        return np.interp(ends, self.edges, sums) - np.interp(starts, self.edges, sums)


def timeline(record: RankRecord, *, wall_s: float) -> Timeline:
    """What one rank did from the run's beginning to its end."""
    edges, state = _paint(record.spans, wall_s)
    first_s, usual_s = _first_and_usual_step(record.steps)
    bare = state == _BARE
    middle = (edges[:-1] + edges[1:]) / 2
    starting = bare & (middle < first_s)
    stalled = _long_runs(bare & ~starting, edges, max(STALL_S, STALL_STEPS * usual_s))
    state[bare] = STATES.index("unattributed")
    state[stalled] = STATES.index("stalled")
    state[starting] = STATES.index("startup")
    return Timeline(edges=edges, state=state)


_BARE = np.uint8(255)


def _paint(spans: Spans, wall_s: float) -> tuple[Floats, NDArray[np.uint8]]:
    """Cut the wall time at every border of a span and say which span owns each piece."""
    start = np.clip(spans.start, 0.0, wall_s)
    end = np.clip(spans.end, 0.0, wall_s)
    kept = end > start
    start, end, kind = start[kept], end[kept], spans.kind[kept]
    edges = np.unique(np.concatenate([[0.0, wall_s], start, end]))
    state = np.full(max(len(edges) - 1, 0), _BARE, np.uint8)
    first, last = np.searchsorted(edges, start), np.searchsorted(edges, end)
    order = _painting_order(start, end, kind)
    if len(state) == 0:
        return np.array([0.0, 0.0]), np.full(1, _BARE, np.uint8)
    for i in order.tolist():
        state[first[i] : last[i]] = _BY_KIND[kind[i]]
    return edges, state


def _painting_order(start: Floats, end: Floats, kind: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Who is painted over by whom: the outer by the inner, and among those that cross, the less specific.

    Spans that touch one another form a cluster; nesting depth orders a cluster, its kinds come second. A span
    starting inside another is at most as deep as the ones that it crosses.
    """
    depth = np.zeros(len(start), np.int64)
    open_ends: list[tuple[float, int]] = []  # those around the current one, the innermost last
    for i in np.lexsort((-end, start)).tolist():
        open_ends = [one for one in open_ends if one[0] > start[i]]
        depth[i] = max((deep + 1 for until, deep in open_ends if until >= end[i]), default=0)
        open_ends.append((float(end[i]), int(depth[i])))
    return np.lexsort((kind, depth))


def _first_and_usual_step(steps: Steps) -> tuple[float, float]:
    if len(steps.start) == 0:
        return 0.0, 0.0
    return float(steps.start[0]), float(np.median(steps.end - steps.start))


def _long_runs(which: NDArray[np.bool_], edges: Floats, least_s: float) -> NDArray[np.bool_]:
    """Of the pieces chosen, those whose unbroken run lasts at least so long."""
    padded = np.concatenate([[False], which, [False]])
    borders = np.flatnonzero(padded[1:] != padded[:-1])
    found = np.zeros(len(which), bool)
    for begin, stop in borders.reshape(-1, 2).tolist():
        if edges[stop] - edges[begin] >= least_s:
            found[begin:stop] = True
    return found
