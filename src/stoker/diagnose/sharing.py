"""Straggler and communication-bound rules: a rank that is late again and again, a long exchange."""

from __future__ import annotations

from stoker.diagnose import remedies
from stoker.diagnose.features import Features
from stoker.diagnose.thresholds import at
from stoker.diagnose.verdicts import Abstention, above, percent, priced
from stoker.findings import Finding
from stoker.formats.sizes import counted


def straggler(features: Features) -> Finding | Abstention:
    """One rank's own work takes longer than the others', step after step."""
    kind, ranks = "straggler", features.ranks
    if ranks.ranks < 2:
        return Abstention(kind=kind, why="one rank")
    late = ranks.late_s / ranks.step_s if ranks.step_s > 0 else 0.0
    often = max(at("late_often"), 1 / ranks.ranks + 0.25)
    lost = min(features.loop.steps * ranks.late_s / features.judged_s, 1.0)
    if not late >= at("late") or ranks.late_often < often or lost < at("late_share"):
        return Abstention(kind=kind, why="no rank is last again and again")
    if ranks.late_phase == "compute" and _on_the_host(features) and _had_no_core(features, late):
        missing = ("what the ranks take while each has its core",)
        return Abstention(kind=kind, why=f"rank {ranks.late_rank} may have had no core", missing=missing)
    return priced(
        features,
        kind,
        cause=ranks.late_phase,
        share=lost * (ranks.ranks - 1) / ranks.ranks,  # the late one itself is busy
        speedup=1 / (1 - min(lost, 0.99)),
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
    if share < at("collective_on_host" if _on_the_host(features) else "collective"):
        return Abstention(kind=kind, why=f"the exchange itself took {percent(share)} of the time")
    late = _kept_from_running(features)
    if late:
        missing = ("what the exchange takes while every rank has its core",)
        return Abstention(kind=kind, why=f"{late}: whoever shares a collective waits for it", missing=missing)
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


def _kept_from_running(features: Features) -> str:
    """Ranks that compute on the host: time in a collective is then time that another one had no core."""
    host = features.host
    if host is None or not _on_the_host(features):
        return ""
    if above(host.rank_delay, at("rank_delay")):
        return f"ranks could run and got no core {percent(min(host.rank_delay, 1))} of the time"
    if above(host.others, at("others") * host.allowed):
        return f"others keep {host.others:.1f} of the {counted(host.allowed, 'core')} busy"
    return ""


def _had_no_core(features: Features, late: float) -> bool:
    """Could half of the delay be time without a core? The delay read is the mean over the ranks."""
    host, ranks = features.host, features.ranks.ranks
    return host is not None and above(ranks * host.rank_delay, late / 2)


def _on_the_host(features: Features) -> bool:
    """Do the ranks compute there, and not on cards?"""
    return features.card is None or not above(features.card.util, at("idle_util"))


def _switched_off(features: Features) -> tuple[str, ...]:
    """What of the environment keeps NCCL from its quick links."""
    environ = features.facts.get("nccl_env") or features.facts.get("env") or {}
    names = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE", "NCCL_NVLS_ENABLE")
    bad = {"NCCL_NVLS_ENABLE": "0"}
    if not isinstance(environ, dict):
        return ()
    return tuple(f"{name}={environ[name]}" for name in names if str(environ.get(name)) == bad.get(name, "1"))
