"""The lane of a rank: which state it was in from when to when; the seam to `diagnose.timeline`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from stoker.recording import KINDS, Floats, RankRecord, Recording

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """Stretches of one state each, in order and without a gap: from 0 to the end of the run."""

    start: Floats
    end: Floats
    state: NDArray[np.uint8]

    @property
    def known_until(self) -> float:
        """When the last span ended: what comes after may still turn out to belong to one."""
        return float(self.start[-1])

    def seconds_by_state(self) -> Floats:
        """Seconds in each of STATES; their sum is the wall time."""
        seconds = np.bincount(self.state, weights=self.end - self.start, minlength=len(STATES))
        return seconds.astype(np.float64)

    def elapsed(self, t: Floats) -> Floats:
        """Seconds spent in each state before each moment: `[state, moment]`."""
        return np.stack([self._elapsed_in(state, t) for state in range(len(STATES))])

    def _elapsed_in(self, state: int, t: Floats) -> Floats:
        here = self.state == state
        if not here.any():
            return np.zeros(len(t))
        start, end = self.start[here], self.end[here]
        moments = np.stack([start, end], axis=1).ravel()
        seconds = np.cumsum(np.stack([np.zeros_like(start), end - start], axis=1).ravel())
        elapsed: Floats = np.interp(t, moments, seconds)
        return elapsed


def lanes_of(recording: Recording) -> list[Lane]:
    """One lane per rank."""
    return [_lane(record, recording.wall_s) for record in recording.ranks]


def _lane(record: RankRecord, wall_s: float) -> Lane:
    """Spans one after another; what lies between them is unattributed."""
    start, end, state = [0.0], [0.0], [STATES.index("unattributed")]
    for kind, begin, finish in zip(record.spans.kind, record.spans.start, record.spans.end, strict=True):
        begin = max(float(begin), end[-1])
        finish = max(float(finish), begin)
        start += [end[-1], begin]
        state += [STATES.index("unattributed"), STATES.index(_STATE_OF.get(KINDS[kind], KINDS[kind]))]
        end += [begin, finish]
    start.append(end[-1])
    end.append(max(wall_s, end[-1]))
    state.append(STATES.index("unattributed"))
    return Lane(start=np.array(start), end=np.array(end), state=np.array(state, dtype=np.uint8))
