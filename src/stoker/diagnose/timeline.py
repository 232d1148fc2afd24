"""Time attribution: where the wall time of a rank went, exclusive states that cover it from beginning to end.

Spans may nest (the inner takes its time from the outer) and overlap (the kind that stands first wins); what
no span covers is start-up before the first step, stalled where it lasts far longer than a step, otherwise
unattributed. So the states always sum to the wall time.
"""

from __future__ import annotations

from collections.abc import Iterator
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
        inside: Floats = np.interp(ends, self.edges, sums) - np.interp(starts, self.edges, sums)
        return inside


def timeline(record: RankRecord, *, wall_s: float, ended: str = "") -> Timeline:
    """What one rank did from the run's beginning to its end; after the last step of one that ended well it
    only cleans up."""
    edges, state = _paint(record.spans, wall_s, borders=record.steps.end)
    first_s, usual_s = _first_and_usual_step(record.steps)
    unseen = state == _UNSEEN
    middle = (edges[:-1] + edges[1:]) / 2
    starting = unseen & (middle < first_s)
    least_s = max(STALL_S, STALL_STEPS * usual_s)
    well = ended == "exit 0" and len(record.steps.end)
    last_s = float(record.steps.end[-1]) if well else left_at(record, wall_s=wall_s)
    ending = middle > last_s
    watched = len(record.steps.end) + len(record.spans.end) > 0  # from outside nobody can tell that it stands
    quiet = unseen & ~starting & ~ending & watched
    stalled = _long_runs(quiet, edges, least_s=least_s, borders=record.steps.end)
    state[unseen] = STATES.index("unattributed")
    state[stalled] = STATES.index("stalled")
    state[starting] = STATES.index("startup")
    return Timeline(edges=edges, state=state)


def left_at(record: RankRecord, *, wall_s: float) -> float:
    """When a rank left its loop for good: it said so, died of an exception, or was seen to exit. What follows
    is its end and no stop."""
    last_s = float(record.steps.end[-1]) if len(record.steps.end) else 0.0
    told = [event.t for event in record.events if event.what in _LEAVING and event.t >= last_s]
    return min([wall_s, *told])


_LEAVING = ("leaving", "exception", "exit")
_UNSEEN = np.uint8(255)
_H2D = KINDS.index("h2d")
_EVALUATION = KINDS.index("evaluation")


def _paint(spans: Spans, wall_s: float, *, borders: Floats) -> tuple[Floats, NDArray[np.uint8]]:
    """Cut the wall time at every border of a span or step and say which span owns each piece."""
    start = np.clip(spans.start, 0.0, wall_s)
    end = np.clip(spans.end, 0.0, wall_s)
    kept = end > start
    start, end, kind = start[kept], end[kept], spans.kind[kept]
    edges = np.unique(np.concatenate([[0.0, wall_s], start, end, np.clip(borders, 0.0, wall_s)]))
    state = np.full(max(len(edges) - 1, 0), _UNSEEN, np.uint8)
    first, last = np.searchsorted(edges, start), np.searchsorted(edges, end)
    if len(state) == 0:
        return np.array([0.0, 0.0]), np.full(1, _UNSEEN, np.uint8)
    depth = _depths(start, end)
    depth[kind == _H2D] = depth.max(initial=0) + 1
    depth[kind == _EVALUATION] = depth.max(initial=0) + 1  # its loads and forwards train nothing
    for number, mine in _painting_order(depth, kind):
        state[_covered(first[mine], last[mine], len(state))] = _BY_KIND[number]
    return edges, state


def _painting_order(
    depth: NDArray[np.int64], kind: NDArray[np.uint8]
) -> Iterator[tuple[int, NDArray[np.bool_]]]:
    """Who is painted over by whom: the outer by the inner; of two that cross, the kind that stands later. And
    all by a copy: while the card copies, what the host has launched meanwhile waits for it."""
    last = len(KINDS) - 1
    rank = depth * len(KINDS) + (last - kind)
    for place in np.unique(rank).tolist():
        yield last - place % len(KINDS), rank == place


def _covered(first: NDArray[np.int64], last: NDArray[np.int64], pieces: int) -> NDArray[np.bool_]:
    """The pieces inside any of the stretches from `first` to `last`."""
    opened = np.bincount(first, minlength=pieces + 1) - np.bincount(last, minlength=pieces + 1)
    inside: NDArray[np.bool_] = np.cumsum(opened)[:pieces] > 0
    return inside


def _depths(start: Floats, end: Floats) -> NDArray[np.int64]:
    """How many spans lie around each; only those that touch another are looked at one by one.

    A live view asks every second and a long run has half a million spans: most stand alone.
    """
    order = np.lexsort((-end, start))
    depth = np.zeros(len(start), np.int64)
    if not len(order):
        return depth
    before = np.concatenate([[-np.inf], np.maximum.accumulate(end[order])[:-1]])
    fresh = start[order] >= before  # all earlier ones have ended
    crowd = order[~(fresh & np.append(fresh[1:], True))]
    open_ends: list[tuple[float, int]] = []
    depths = []
    for begins, ends in zip(start[crowd].tolist(), end[crowd].tolist(), strict=True):
        open_ends = [one for one in open_ends if one[0] > begins]
        deep = max((around + 1 for until, around in open_ends if until >= ends), default=0)
        open_ends.append((ends, deep))
        depths.append(deep)
    depth[crowd] = depths
    return depth


def _first_and_usual_step(steps: Steps) -> tuple[float, float]:
    if len(steps.start) == 0:
        return 0.0, 0.0
    return float(steps.start[0]), float(np.median(steps.end - steps.start))


def _long_runs(
    which: NDArray[np.bool_], edges: Floats, *, least_s: float, borders: Floats
) -> NDArray[np.bool_]:
    """Of the pieces chosen, those whose run lasts so long; a step that ends is progress and breaks it."""
    begins = which & ~np.concatenate([[False], which[:-1]]) | which & np.isin(edges[:-1], borders)
    run = np.cumsum(begins) * which
    lengths = np.bincount(run, np.diff(edges))
    long: NDArray[np.bool_] = which & (lengths[run] >= least_s)
    return long
