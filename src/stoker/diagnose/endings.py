"""Endings: a run that crashed, was preempted or was interrupted, with who went first and of what."""

from __future__ import annotations

from typing import Any

from stoker.diagnose import remedies
from stoker.diagnose.features import Features
from stoker.diagnose.verdicts import Abstention, priced
from stoker.findings import Finding


def crashed(features: Features) -> Finding | Abstention:
    """An exception, a signal or an exit code ended the job."""
    return _ended(features, "crashed")


def preempted(features: Features) -> Finding | Abstention:
    """Somebody told the job to end: a scheduler, a node that goes away."""
    return _ended(features, "preempted")


def interrupted(features: Features) -> Finding | Abstention:
    """Ctrl-C."""
    return _ended(features, "interrupted")


def ending_of(features: Features) -> dict[str, Any]:
    """What the watcher noted of a bad end; empty where there was none, or nobody noted it."""
    told = features.facts.get("ending")
    return told if isinstance(told, dict) else {}


def _ended(features: Features, kind: str) -> Finding | Abstention:
    told = ending_of(features)
    if told.get("kind") != kind:
        return Abstention(kind=kind, why=f"it ended with: {features.ended[:200] or 'nothing that was noted'}")
    return priced(
        features,
        kind,
        cause=str(told.get("cause") or ""),
        share=0.0,
        confidence=0.95,
        summary=_summary(kind, told),
        evidence=_evidence(features, told),
        remedy=_remedy(kind, told),
    )


def _summary(kind: str, told: dict[str, Any]) -> str:
    text = str(told.get("text") or told.get("line") or "")[:300]
    where = f", in {told['where']}" if told.get("where") else ""
    if kind == "crashed":
        rank = f"rank {told['rank']}: " if told.get("rank") is not None and "rank" not in text else ""
        return f"the job ended with {rank}{text}{where}"
    return f"the job was told to end: {text}" if kind == "preempted" else f"somebody ended the job: {text}"


def _evidence(features: Features, told: dict[str, Any]) -> tuple[str, ...]:
    said = [f"it ended with: {features.ended[:300]}"]
    if isinstance(told.get("at"), (int, float)):
        first = f"rank {told['rank']} went first" if told.get("rank") is not None else "that was"
        said.append(f"{first}, at {told['at']:.1f} s")
    said += [f"caused by {str(one)[:300]}" for one in told.get("chain") or ()]
    return tuple(said)


def _remedy(kind: str, told: dict[str, Any]) -> tuple[str, ...]:
    if kind == "interrupted":
        return ()
    if kind == "preempted":
        return remedies.PREEMPTED
    by_cause = {
        "out_of_memory": remedies.OUT_OF_MEMORY,
        "worker": remedies.WORKER_KILLED,
        "nccl": remedies.COLLECTIVE_HANG,
    }
    text = str(told.get("text"))
    if told.get("cause") == "signal" and "SIGKILL" in text:
        return remedies.OUT_OF_MEMORY
    return by_cause.get(str(told.get("cause")), remedies.CRASHED)
