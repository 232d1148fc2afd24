"""Simulation records: a cluster, a policy, and the course that comes out."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.errors import UsageError
from stoker.plan.arithmetic import ROOM, SHARD_BYTES, Plan

Floats = NDArray[np.float64]

STAGINGS = ("none", "everything", "share")
SAVINGS = ("stop", "behind")
CAUSES = ("start", "data", "straggler", "checkpoint", "failure")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """Nodes in lock-step before one store. Rates are bytes a second, of a node unless said otherwise.

    Up to `knee` streams the store gives all of `store_rate`; at (1 + k) times the knee it gives 1 / (1 +
    slope * k) of it, as `checkpoint.storm` has it; 0 is no knee."""

    nodes: int
    demand: float  # what a node consumes while it computes
    dataset: float
    store_rate: float
    epochs: float = 2.0
    node_rate: float = 0.0
    cache: float = 0.0  # bytes of a node's NVMe
    nvme_rate: float = 0.0
    ahead: float = float(SHARD_BYTES)  # bytes read ahead where nothing is staged
    first: float = float(SHARD_BYTES)  # bytes with which training begins where the rest follows
    knee: int = 1024
    slope: float = 0.1
    slow_links: float = 0.0  # share of nodes whose network is `slow_link` of the others'
    slow_link: float = 1.0
    slow_gpus: float = 0.0  # share of nodes that compute at `slow_gpu` of the others' speed
    slow_gpu: float = 1.0
    checkpoint: float = 0.0  # bytes of a node
    interval_s: float = 0.0
    stop_interval_s: float = 0.0  # where the loop stands still for a save, it saves more seldom
    stall_s: float = 0.0  # of a save that goes on behind the loop
    mtbf_s: float = 0.0  # a node is lost so often, at even distances; 0 is never
    restart_s: float = 0.0  # until the job goes on from its newest checkpoint

    def __post_init__(self) -> None:
        for name in ("nodes", "demand", "dataset", "store_rate", "epochs"):
            if getattr(self, name) <= 0:
                raise UsageError(f"a simulation needs {name}", hint=f"give the job {_SOURCE[name]}")

    @property
    def share(self) -> float:
        """What a node reads in an epoch."""
        return self.dataset / self.nodes


_SOURCE = {
    "nodes": "nodes",
    "demand": "step, batch and sample, or read_rate",
    "dataset": "dataset",
    "store_rate": "store_rate",
    "epochs": "epochs",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """How a job goes about it.

    staging     "none": every epoch is read from the store, each time other samples on a node
                "everything": each node copies the dataset before step one, as far as it fits
                "share": a node reads the same part every epoch and keeps it; training begins with its start
    peers       what a neighbour has comes from there
    stagger_s   nodes begin spread over so many seconds
    cap         bytes a second a node may take from the store; 0 is no cap
    saving      "stop": the loop waits until the store has the checkpoint; "behind": for its snapshot only
    """

    name: str
    staging: str = "share"
    peers: bool = False
    stagger_s: float = 0.0
    cap: float = 0.0
    saving: str = "behind"
    save_stagger_s: float = 0.0

    def __post_init__(self) -> None:
        for name, allowed in (("staging", STAGINGS), ("saving", SAVINGS)):
            if getattr(self, name) not in allowed:
                raise UsageError(
                    f"{name}={getattr(self, name)!r} is unknown", hint=f"use one of {', '.join(allowed)}"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How a job went: columns over time, and their sums. `idle` has a row for each of CAUSES."""

    policy: Policy
    cluster: Cluster
    t: Floats  # the end of each piece of time between two events
    idle: Floats  # of each piece, [cause, piece], shares
    store: Floats  # share of the store's rate in use
    seconds: float
    first_step_s: float
    store_bytes: float
    saturated_s: float  # the store gave all it has
    whole: bool  # it came to its end

    @property
    def idle_share(self) -> float:
        return float(sum(self.shares().values()))

    def shares(self) -> dict[str, float]:
        """The share of all time that went to each cause."""
        lengths = np.diff(self.t, prepend=0.0)
        return dict(zip(CAUSES, (self.idle @ lengths / max(self.seconds, 1e-9)).tolist(), strict=True))

    @property
    def saturated(self) -> float:
        """The share of time in which the store gave all it has."""
        return self.saturated_s / max(self.seconds, 1e-9)

    def as_plain(self, points: int = 200) -> dict[str, Any]:
        picked = np.unique(np.linspace(0, len(self.t) - 1, points).astype(int))
        return {
            "policy": asdict(self.policy),
            "nodes": self.cluster.nodes,
            "idle_share": self.idle_share,
            "causes": self.shares(),
            "first_step_s": self.first_step_s,
            "seconds": self.seconds,
            "store_bytes": self.store_bytes,
            "store_saturated": self.saturated,
            "whole": self.whole,
            "t": self.t[picked].round(3).tolist(),
            "idle": self.idle.sum(axis=0)[picked].round(4).tolist(),
        }


def cluster_of(plan: Plan, **changes: Any) -> Cluster:
    """The cluster of a planned job; two epochs, of which the first is unlike those that follow."""
    job = plan.job
    known: dict[str, Any] = {
        "nodes": job.nodes,
        "demand": plan.reading.node,
        "dataset": float(job.dataset),
        "store_rate": job.store_rate,
        "node_rate": job.node_rate,
        "cache": job.nvme * ROOM,
        "nvme_rate": job.nvme_rate,
        "ahead": float(job.gpus_per_node * max(64 << 20, plan.loading.threads * job.read_block)),
        "first": float(min(plan.caching.share, job.gpus_per_node * SHARD_BYTES)),
        "checkpoint": plan.saving.node_bytes,
        "interval_s": plan.saving.interval_s,
        "stop_interval_s": plan.saving.sync_interval_s,
        "stall_s": plan.saving.stall_s,
    }
    return Cluster(**{**known, **changes})
