"""Cache hit rates: what a node's cache has of an epoch's reads, under each policy. Pure."""

from __future__ import annotations

import math

import numpy as np

from stoker.plan.scene import Cluster, Floats, Policy


def hit_share(cluster: Cluster, policy: Policy, epoch: int) -> float:
    """The share of an epoch's reads that a node's own cache has."""
    if policy.staging == "everything":
        return min(1.0, cluster.cache / cluster.dataset)
    if epoch == 0:
        return 0.0
    if policy.staging == "share":
        return min(1.0, cluster.cache / cluster.share)
    # other samples each epoch: what a node has read before it meets again by chance
    return min(cluster.cache / cluster.dataset, epoch / cluster.nodes)


def misses(cluster: Cluster, policy: Policy) -> float:
    """Bytes a node fetches in all epochs, besides what it copied before the first."""
    parts = (min(1.0, cluster.epochs - epoch) for epoch in range(math.ceil(cluster.epochs)))
    return cluster.share * sum(
        part * (1 - hit_share(cluster, policy, epoch)) for epoch, part in enumerate(parts)
    )


def from_store(cluster: Cluster, policy: Policy, epoch: int, *, copying: bool) -> float:
    """The part of what a node fetches that only the store has; the rest comes from peers."""
    if not policy.peers:
        return 1.0
    if policy.staging == "everything" and copying:
        return 1 / cluster.nodes  # each piece comes once and goes from node to node
    if epoch == 0:
        return 1.0
    return max(0.0, 1 - cluster.nodes * cluster.cache / cluster.dataset)


def kept_after_loss(cluster: Cluster, policy: Policy, landed: Floats, *, missed: float) -> Floats:
    """Bytes in hand when a job goes on from `missed`: a share that is being staged is on the nodes' disks,
    buffers are gone."""
    again = missed < cluster.share and cluster.cache >= cluster.share
    if policy.staging == "share" and again:
        return np.maximum(0.0, np.minimum(landed, cluster.share) - missed)
    return np.zeros(len(landed))
