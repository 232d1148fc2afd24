"""Measures of how an order shuffles. Each is a number that a true random permutation has a known spread of.

An order is what ranks get in an epoch, as an array of samples [rank, row of an epoch]. The corpus is cut into
equal parts; a corpus that was not shuffled before is a different thing in each.
"""

from __future__ import annotations

import numpy as np

PARTS = 24


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Between what stands at the same place in two epochs, or with two seeds."""
    return float(np.corrcoef(one.T.reshape(-1), other.T.reshape(-1))[0, 1])


def trend(order: np.ndarray) -> float:
    """Between time and place: 1 is the order on disk."""
    sequence = order.T.reshape(-1)
    return float(np.corrcoef(np.arange(len(sequence)), sequence)[0, 1])


def neighbour_distance(order: np.ndarray) -> float:
    """How far apart neighbours in a rank's sequence lie, as a share of the corpus; a third by chance."""
    return float(np.abs(np.diff(order, axis=1)).mean() / order.size)


def by_row(order: np.ndarray, batch: int) -> float:
    """Chi-square of parts by row of a global batch, per degree of freedom; 1 by chance."""
    ranks, rows = order.shape
    batches = order[:, : rows // batch * batch].reshape(ranks, -1, batch)
    return chi_square(batches.transpose(0, 2, 1).reshape(ranks * batch, -1), order.size)


def by_rank(order: np.ndarray) -> float:
    """Chi-square of parts by rank, per degree of freedom; 1 by chance, and 0 for one rank."""
    return chi_square(order, order.size) if len(order) > 1 else 0.0


def chi_square(groups: np.ndarray, samples: int) -> float:
    counts = np.stack([np.bincount(group, minlength=PARTS) for group in groups * PARTS // samples])
    expected = counts.sum(axis=1, keepdims=True) * counts.sum(axis=0) / counts.sum()
    freedom = max(1, len(groups) - 1) * (PARTS - 1)
    return float(((counts - expected) ** 2 / expected).sum() / freedom)


def meetings(order: np.ndarray, batch: int) -> np.ndarray:
    """How often each two parts are in one global batch, [part, part]."""
    ranks, rows = order.shape
    batches = order[:, : rows // batch * batch].reshape(ranks, -1, batch).transpose(1, 0, 2)
    parts = batches * PARTS // order.size
    counts = np.apply_along_axis(np.bincount, 1, parts.reshape(len(parts), -1), minlength=PARTS)
    met: np.ndarray = counts.T @ counts - np.diag(counts.sum(axis=0))
    return met


def pairs_met(order: np.ndarray, batch: int) -> float:
    """Of all pairs of parts, the share that are ever in one batch."""
    met = meetings(order, batch)[np.triu_indices(PARTS, 1)]
    return float((met > 0).mean())


def evenness(order: np.ndarray, batch: int) -> float:
    """How often two samples of a batch are of one part, against chance: below 1 is more even than chance."""
    met = meetings(order, batch)
    total = met.sum()
    return float(np.trace(met) / total * PARTS) if total else 1.0


def all_measures(order: np.ndarray, other: np.ndarray, batch: int) -> dict[str, float]:
    """Of an order, and of another epoch or seed beside it."""
    return {
        "correlation": correlation(order, other),
        "trend": trend(order),
        "neighbour_distance": neighbour_distance(order),
        "by_row": by_row(order, batch),
        "by_rank": by_rank(order),
        "pairs_met": pairs_met(order, batch),
        "evenness": evenness(order, batch),
    }


def true_permutation(rng: np.random.Generator, samples: int, ranks: int) -> np.ndarray:
    each: np.ndarray = rng.permutation(samples)[: samples // ranks * ranks]
    return each.reshape(-1, ranks).T
