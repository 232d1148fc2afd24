"""How the ranks of a run fare beside one another: who is late, in which phase, what exchange costs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from stoker.diagnose.timeline import STATES, Timeline
from stoker.recording import Floats, RankRecord

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
    collective: float = 0.0  # the least share of time any rank spent in collectives: the exchange itself
    joined: dict[int, int] = field(default_factory=dict)  # rank → collectives it joined until it hung
    data: float = 0.0  # the least share of time any rank waited for data
    last_phase: dict[int, str] = field(default_factory=dict)  # rank → what it did longest after its last step


def together(ranks: tuple[RankRecord, ...], lines: tuple[Timeline, ...]) -> Together:
    """Compare the ranks."""
    last = {rank.rank: _last_phase(rank, line) for rank, line in zip(ranks, lines, strict=True)}
    joined = {rank.rank: _joined(rank) for rank in ranks if _joined(rank)}
    waited = min((_share_of(line, "data") for line in lines), default=0.0)
    steps = min((len(rank.steps.end) for rank in ranks), default=0)
    if steps < 3:
        return Together(ranks=len(ranks), last_phase=last, joined=joined, data=waited)
    least = min(_share_of(line, "collective") for line in lines)
    step_s = float(np.median(ranks[0].steps.end - ranks[0].steps.start))
    if len(ranks) < 2:
        return Together(ranks=1, collective=least, step_s=step_s, last_phase=last, joined=joined, data=waited)
    spent = {
        name: np.stack([_each(rank, line, name, steps) for rank, line in zip(ranks, lines, strict=True)])
        for name in _OWN
    }
    if least < 0.005:  # collectives were not seen: they hide in the compute of those that wait
        spent.pop("compute")
    own: Floats = sum(spent.values())  # type: ignore[assignment]
    late = int(np.argmax(np.median(own, axis=1)))
    over = own[late] - np.median(np.delete(own, late, axis=0), axis=0)
    phase = max(spent, key=lambda name: float(np.median(_over_others(spent[name], late))))
    return Together(
        ranks=len(ranks),
        late_rank=ranks[late].rank,
        late_phase=phase,
        late_s=float(np.median(over)),
        late_often=float(np.mean(np.argmax(own, axis=0) == late)),
        step_s=step_s,
        collective=least,
        last_phase=last,
        joined=joined,
        data=waited,
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
    """A span that never ended is in no timeline; what hung said where it was."""
    for event in reversed(rank.events):
        if event.what == "hang over":
            break
        if event.what == "hang":
            inside = (
                "collective" if event.facts.get("in_collective") else str(event.facts.get("inside") or "")
            )
            return inside or "unattributed"
    begin = rank.steps.end[-1:] if len(rank.steps.end) else np.zeros(1)
    return max(STATES, key=lambda name: float(line.within(name, begin, line.edges[-1:])[0]))


def _joined(rank: RankRecord) -> int:
    hangs = [event for event in rank.events if event.what == "hang"]
    return int(hangs[-1].facts.get("collective_seq") or 0) if hangs else 0
