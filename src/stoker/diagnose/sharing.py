"""Ranks together: one that is late again and again, or an exchange that takes too long for all."""

from __future__ import annotations

from stoker.diagnose import remedies
from stoker.diagnose.features import Features
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, percent, priced
from stoker.findings import Finding


def straggler(features: Features) -> Finding | Abstention:
    """One rank's own work takes longer than the others', step after step."""
    kind, ranks = "straggler", features.ranks
    if ranks.ranks < 2:
        return Abstention(kind=kind, why="one rank")
    late = ranks.late_s / ranks.step_s if ranks.step_s > 0 else 0.0
    if not late >= at("late") or ranks.late_often < at("late_often"):
        return Abstention(kind=kind, why="no rank is last again and again")
    return priced(
        features,
        kind,
        cause=ranks.late_phase,
        share=min(late, 1.0) * (ranks.ranks - 1) / ranks.ranks,
        speedup=1 / (1 - min(late, 0.99)),
        confidence=round(min(0.6 + 0.4 * ranks.late_often, 0.97), 2),
        summary=f"rank {ranks.late_rank} is late ({ranks.late_phase}): {percent(late)} of each step is lost",
        evidence=(
            f"rank {ranks.late_rank} works {1000 * ranks.late_s:.0f} ms longer than the others' median, "
            f"last in {percent(ranks.late_often)} of the steps",
        ),
        remedy=remedies.STRAGGLER,
    )


def communication_bound(features: Features) -> Finding | Abstention:
    """Even the rank that waits least spends long in collectives: that is the exchange itself."""
    kind, share = "communication_bound", features.ranks.collective
    if features.ranks.ranks < 2 and share <= 0:
        return Abstention(kind=kind, why="one rank")
    if share < at("collective"):
        return Abstention(kind=kind, why=f"the exchange itself took {percent(share)} of the time")
    switched_off = _switched_off(features)
    return priced(
        features,
        kind,
        share=share,
        confidence=0.85,
        summary=f"exchanging gradients takes {percent(share)} of the time",
        evidence=(f"the rank that waits least spends {percent(share)} in collectives", *switched_off),
        remedy=(
            *(f"unset {name.partition('=')[0]}" for name in switched_off),
            *remedies.EXCHANGE,
        ),
        missing=() if switched_off else ("NCCL's environment and the links in use",),
    )


def _switched_off(features: Features) -> tuple[str, ...]:
    """What of the environment keeps NCCL from its quick links."""
    environ = features.facts.get("nccl_env") or features.facts.get("env") or {}
    names = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE")
    bad = {"NCCL_NVLS_ENABLE": "0"}
    if not isinstance(environ, dict):
        return ()
    return tuple(f"{name}={environ[name]}" for name in names if str(environ.get(name)) == bad.get(name, "1"))
