"""Clock synchronisation: a collective ends on every rank at nearly the same moment, whatever clocks say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from stoker.recording import KINDS, Spans

_COLLECTIVE = KINDS.index("collective")
_ENOUGH = 3  # matched collectives below which the time of day is believed instead


def skews(ranks: Sequence[tuple[str, Spans]]) -> Mapping[str, float]:
    """Seconds to take from each clock's times, given (clock, spans) of each rank; the first clock is right.

    The median over matched collectives: a rank may leave one late, it cannot leave before all have come.
    """
    if not ranks:
        return {}
    reference, ends = ranks[0][0], collective_ends(ranks[0][1])
    found: dict[str, list[float]] = {}
    for clock, spans in ranks:
        if clock != reference:
            theirs = collective_ends(spans)
            found.setdefault(clock, []).extend(theirs[key] - ends[key] for key in theirs.keys() & ends.keys())
    settled = {clock: float(np.median(d)) for clock, d in found.items() if len(d) >= _ENOUGH}
    return {reference: 0.0, **{clock: settled.get(clock, 0.0) for clock in found}}


def collective_ends(spans: Spans) -> dict[tuple[int, int], float]:
    """Ends of collectives by (step, which of the step): the same on every rank of a group."""
    mine = spans.kind == _COLLECTIVE
    ends: dict[tuple[int, int], float] = {}
    counts: dict[int, int] = {}
    for end, step in zip(spans.end[mine], spans.step[mine], strict=True):
        ends[int(step), counts.get(int(step), 0)] = float(end)
        counts[int(step)] = counts.get(int(step), 0) + 1
    return ends
