"""Prometheus counters: what has been counted over a whole run, and may only grow.

A live recording changes in two ways a counter must not: its oldest part is overwritten, and its newest is
judged anew when a span that was under way has ended. So time is counted once it is settled, and then kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from stoker.diagnose.timeline import STATES
from stoker.recording import Floats
from stoker.report.summary import RankSummary, Summary, seconds_within

STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
# A span that lasts longer is counted as what it looks like meanwhile: a hang must show while it lasts.
SETTLED_AFTER_S = 30.0


@dataclass(kw_only=True, slots=True)
class RankTotals:
    """What was counted of one rank up to a moment of the run."""

    until: float = 0.0
    state_s: Floats = field(default_factory=lambda: np.zeros(len(STATES)))
    # of the steps in each bucket; the last: above all
    step_counts: Floats = field(default_factory=lambda: np.zeros(len(STEP_BUCKETS) + 1))
    step_s: float = 0.0
    tokens: float = 0.0


class Totals:
    """Sums over every summary of one run; `add` them in order."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[int, str], RankTotals] = {}
        self.cost_s: dict[str, float] = {}

    def add(self, summary: Summary) -> None:
        """Count what has settled since the summary before."""
        for rank in summary.ranks:
            self._count(self._ranks.setdefault((rank.rank, rank.node), RankTotals()), rank, summary)
        for finding in summary.findings:
            self.cost_s[finding.kind] = max(self.cost_s.get(finding.kind, 0.0), finding.gpu_seconds)

    def ranks(self) -> Iterator[tuple[tuple[str, str], RankTotals]]:
        """Rank and node as labels, and what was counted."""
        for (rank, node), totals in sorted(self._ranks.items()):
            yield (str(rank), node), totals

    def _count(self, totals: RankTotals, rank: RankSummary, summary: Summary) -> None:
        since = max(0.0, totals.until - summary.dropped_s)
        until = max(since, _settled(rank, summary))
        totals.state_s += seconds_within(rank.timeline, np.array([since]), np.array([until]))[:, 0]
        new = (rank.step_end > since) & (rank.step_end <= until)
        places = np.searchsorted(STEP_BUCKETS, rank.step_s[new])
        totals.step_counts += np.bincount(places, minlength=len(STEP_BUCKETS) + 1)
        totals.step_s += float(rank.step_s[new].sum())
        totals.tokens += float(np.nansum(rank.step_tokens[new]))
        totals.until = summary.dropped_s + until


def _settled(rank: RankSummary, summary: Summary) -> float:
    """Until when a rank's states will not change any more."""
    if not summary.running:
        return summary.wall_s
    return max(rank.settled_t, summary.wall_s - SETTLED_AFTER_S)
