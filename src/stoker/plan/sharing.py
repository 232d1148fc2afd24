"""Max-min fairness: how a store shares its rate among those who want bytes. Pure."""

from __future__ import annotations

import math

import numpy as np

from stoker.plan.scene import Cluster, Floats


def fair_level(wishes: Floats, counts: Floats, total: float) -> float:
    """The rate nobody gets more than: everyone has the same, except those who want less. Wishes are of one of
    `counts` alike."""
    if float(wishes @ counts) <= total:
        return math.inf
    order = np.argsort(wishes)
    left, wanting = total, float(counts.sum())
    for wish, count in zip(wishes[order].tolist(), counts[order].tolist(), strict=True):
        if wish * wanting >= left:
            break
        left -= wish * count
        wanting -= count
    return left / wanting


def store_total(cluster: Cluster, streams: float) -> float:
    """What the store gives to so many streams: all it has up to its knee, then less."""
    beyond = max(0.0, streams / cluster.knee - 1) if cluster.knee else 0.0
    return cluster.store_rate / (1 + cluster.slope * beyond)
