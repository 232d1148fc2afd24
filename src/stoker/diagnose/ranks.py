"""Stragglers: how the ranks fare beside one another, who is late, in which phase, what exchange costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from stoker.diagnose.timeline import STATES, Timeline
from stoker.recording import KINDS, Event, Floats, RankRecord

# Phases that are a rank's own. Collective and sync are where it waits for the others.
_OWN = ("data", "copy", "compute", "checkpoint", "unattributed", "stalled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Together:
    """Ranks compared step by step over the steps all of them ended."""

    ranks: int
    late_rank: int = -1
    late_phase: str = ""
    late_s: float = math.nan  # a step: its own work over the median of the others
    late_often: float = 0.0  # share of steps in which it was the last
    step_s: float = math.nan
    collective: float = 0.0  # share of time of the exchange itself, without waiting for who comes late
    joined: dict[int, int] = field(default_factory=dict)  # rank → collectives it joined until it hung
    ops: dict[int, str] = field(default_factory=dict)  # rank → the collective it hung in
    data: float = 0.0  # the least share of time any rank waited for data
    last_phase: dict[int, str] = field(default_factory=dict)  # rank → what it did longest after its last step


def together(ranks: tuple[RankRecord, ...], lines: tuple[Timeline, ...]) -> Together:
    """Compare the ranks."""
    base = _endings(ranks, lines)
    steps = min((len(rank.steps.end) for rank in ranks), default=0)
    if steps < 3:
        return base
    base = replace(
        base,
        step_s=float(np.median(ranks[0].steps.end - ranks[0].steps.start)),
        collective=_exchange(ranks, lines, steps),
    )
    return base if len(ranks) < 2 else _who_is_late(base, ranks, lines, steps)


def _exchange(ranks: tuple[RankRecord, ...], lines: tuple[Timeline, ...], steps: int) -> float:
    """Whoever comes last to a collective waits for nobody: its time is the exchange. Where ranks do not show
    the same collectives, who waits least in a step."""
    each = [_collectives(rank) for rank in ranks]
    if len({len(some) for some in each}) > 1:
        pairs = zip(ranks, lines, strict=True)
        each = [_each(rank, line, "collective", steps) for rank, line in pairs]
    wall = float(lines[0].edges[-1] - lines[0].edges[0])
    least = min(_share_of(line, "collective") for line in lines)
    return min(least, float(np.min(each, axis=0).sum()) / wall) if wall > 0 else 0.0


def _collectives(rank: RankRecord) -> Floats:
    mine = rank.spans.kind == KINDS.index("collective")
    spent: Floats = (rank.spans.end - rank.spans.start)[mine]
    return spent


def _endings(ranks: tuple[RankRecord, ...], lines: tuple[Timeline, ...]) -> Together:
    """Where each rank stood when the recording ended."""
    hangs = {rank.rank: hang for rank in ranks for hang in [_hang(rank)] if hang}
    return Together(
        ranks=len(ranks),
        last_phase={rank.rank: _last_phase(rank, line) for rank, line in zip(ranks, lines, strict=True)},
        joined={rank: int(hang.facts.get("collective_seq") or 0) for rank, hang in hangs.items()},
        ops={
            rank: str(hang.facts.get("collective_op"))
            for rank, hang in hangs.items()
            if hang.facts.get("in_collective") and hang.facts.get("collective_op")
        },
        data=min((_share_of(line, "data") for line in lines), default=0.0),
    )


def _who_is_late(
    base: Together, ranks: tuple[RankRecord, ...], lines: tuple[Timeline, ...], steps: int
) -> Together:
    pairs = list(zip(ranks, lines, strict=True))
    spent = {name: np.stack([_each(rank, line, name, steps) for rank, line in pairs]) for name in _OWN}
    if base.collective < 0.005:  # collectives were not seen: they hide in the compute of those that wait
        spent.pop("compute")
    own: Floats = np.sum(list(spent.values()), axis=0)
    late = int(np.argmax(np.median(own, axis=1)))
    return replace(
        base,
        late_rank=ranks[late].rank,
        late_phase=max(spent, key=lambda name: float(np.median(_over_others(spent[name], late)))),
        late_s=float(np.median(_over_others(own, late))),
        late_often=float(np.mean(np.argmax(own, axis=0) == late)),
    )


def _share_of(line: Timeline, name: str) -> float:
    wall = float(line.edges[-1] - line.edges[0])
    return line.seconds()[name] / wall if wall > 0 else 0.0


def _each(rank: RankRecord, line: Timeline, name: str, steps: int) -> Floats:
    spent: Floats = line.within(name, rank.steps.start[:steps], rank.steps.end[:steps])
    return spent


def _over_others(spent: Floats, late: int) -> Floats:
    over: Floats = spent[late] - np.median(np.delete(spent, late, axis=0), axis=0)
    return over


def _last_phase(rank: RankRecord, line: Timeline) -> str:
    """What it did longest after its last step; a span that never ended is in no timeline, a hang tells it."""
    hang = _hang(rank)
    if hang:
        inside = "collective" if hang.facts.get("in_collective") else str(hang.facts.get("inside") or "")
        return inside or "unattributed"
    begin = rank.steps.end[-1:] if len(rank.steps.end) else np.zeros(1)
    return max(STATES, key=lambda name: float(line.within(name, begin, line.edges[-1:])[0]))


def _hang(rank: RankRecord) -> Event | None:
    """The last hang that did not end."""
    told = [event for event in rank.events if event.what in ("hang", "hang over")]
    return told[-1] if told and told[-1].what == "hang" else None
