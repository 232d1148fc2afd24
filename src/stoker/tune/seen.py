"""What a first window of the job shows: its verdict, its loader, and what the machine allows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.diagnose.features import features
from stoker.diagnose.rules import judge
from stoker.findings import Finding
from stoker.machine.allowed import free_bytes, usable_cores
from stoker.recording import KINDS, Recording


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Of one rank: cores, memory and shared memory that its workers may take."""

    cores: int = 1
    memory_bytes: int = 1 << 40
    shm_bytes: int = 1 << 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """All that candidates are chosen by. `site` is empty where no DataLoader was seen to train."""

    findings: tuple[Finding, ...] = ()
    step_s: float = 0.0
    wait: float = 0.0  # share of the time in the loader's next
    site: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    iterable: bool = False
    epoch: int = 0  # batches of one; 0 where nobody knows
    batch_bytes: int = 0
    threads: int = 0
    card: bool = False
    optimizing: float = 0.0  # share of the time in the optimizer's step
    limits: Limits = field(default_factory=Limits)

    @property
    def workers(self) -> int:
        return int(self.settings.get("num_workers") or 0)

    def finding(self, kind: str) -> Finding | None:
        return next((one for one in self.findings if one.kind == kind), None)

    @property
    def short_epochs(self) -> bool:
        """Workers that live for an epoch are started again and again: half a minute is soon over."""
        return 0 < self.epoch * self.step_s < 30.0


def read_seen(recording: Recording, *, ranks: int) -> Seen:
    """The verdict of a recording, and the loader that its training batches came from."""
    known = features(recording)
    facts = recording.facts
    loader = facts.get("loader") or {}
    built = _built(facts.get("loaders") or [], loader.get("number"))
    return Seen(
        findings=judge(known).findings,
        step_s=known.loop.median_s if np.isfinite(known.loop.median_s) else 0.0,
        wait=float(known.loop.share["data"]),
        site={name: built[name] for name in ("file", "line", "function", "text", "through")} if built else {},
        settings=dict(built["settings"]) if built else {},
        iterable=bool(built.get("iterable")),
        epoch=int(built.get("length") or 0),
        batch_bytes=int(loader.get("batch_bytes") or 0),
        threads=int(facts.get("threads") or 0),
        card=bool(recording.gpus),
        optimizing=_share(recording, "optimizer"),
        limits=read_limits(ranks),
    )


def read_limits(ranks: int) -> Limits:
    """A rank's part of what this process may use: the cgroup's cores, not the machine's."""
    try:
        room = os.statvfs("/dev/shm")
        shm = room.f_bavail * room.f_frsize
    except OSError:
        shm = 0
    return Limits(
        cores=max(1, usable_cores() // max(1, ranks)),
        memory_bytes=free_bytes() // max(1, ranks),
        shm_bytes=shm // max(1, ranks),
    )


def _built(loaders: list[dict[str, Any]], number: int | None) -> dict[str, Any]:
    """Where the training loader was built. A framework builds it anew around the same dataset: the first one
    that the user's own line built is the one to change."""
    if number is None or not 0 <= number < len(loaders):
        return {}
    own = loaders[number]
    if not own["through"]:
        return own
    same = [one for one in loaders[:number] if one["dataset"] == own["dataset"] and not one["through"]]
    return same[0] if same else own


def _share(recording: Recording, kind: str) -> float:
    if not recording.ranks or not recording.wall_s:
        return 0.0
    spans = recording.ranks[0].spans
    which = spans.kind == KINDS.index(kind)
    return float((spans.end - spans.start)[which].sum() / recording.wall_s)
