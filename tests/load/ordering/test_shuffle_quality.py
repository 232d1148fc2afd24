"""The order shuffles as a true random permutation does: measured, against the spread of true ones."""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from stoker.load.ordering.cut import Cut
from stoker.load.ordering.order import Order

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
import shuffle_measures as measures  # it lies beside the benchmark that publishes them

SAMPLES = 24_000


@lru_cache(64)
def epoch_of(ranks, *, seed=0, epoch=0, chunk=1, nodes=1, samples=SAMPLES):
    """What each rank gets in an epoch."""
    order = Order(samples=samples, chunk=chunk, seed=seed, cut=Cut.for_world(ranks, nodes), stretch=10**6)
    rows = samples // ranks * ranks
    return np.stack([order.deal(range(rank, rows, ranks), epoch=epoch).sample for rank in range(ranks)])


@lru_cache(64)
def spread_of_true_permutations(ranks, batch, samples=SAMPLES):
    rng = np.random.default_rng(ranks * 100 + batch)
    pairs = [[measures.true_permutation(rng, samples, ranks) for _ in range(2)] for _ in range(12)]
    found = [measures.all_measures(one, other, batch) for one, other in pairs]
    return {name: np.array([one[name] for one in found]) for name in found[0]}


def check(ranks, batch, one, other):
    for name, value in measures.all_measures(one, other, batch).items():
        true = spread_of_true_permutations(ranks, batch)[name]
        # six sigma of twelve, and not less than what a few samples make
        room = 6 * true.std() + 0.02 * abs(true.mean()) + 1e-9
        if name in ("by_row", "by_rank"):  # more even than chance would be no fault
            assert value < true.mean() + room, (name, value, true)
        else:
            assert abs(value - true.mean()) < room, (name, value, true)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "batch"), [(1, 8), (4, 8)])
def test_epochs_and_seeds_are_within_the_spread_of_true_permutations(ranks, batch):
    one = epoch_of(ranks)
    check(ranks, batch, one, epoch_of(ranks, epoch=1))
    check(ranks, batch, one, epoch_of(ranks, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("batch", [1, 2, 8, 24, 64])
def test_all_batches_and_ranks_are_within_the_spread_of_true_permutations(ranks, batch):
    for seed in range(3):
        for epoch in range(3):
            one = epoch_of(ranks, seed=seed, epoch=epoch)
            check(ranks, batch, one, epoch_of(ranks, seed=seed, epoch=epoch + 1))
            check(ranks, batch, one, epoch_of(ranks, seed=seed + 1, epoch=epoch))


@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_that_are_read_whole_do_not_tie_rows_or_epochs_to_parts(chunk):
    """What chunks add is noise, as of so many fewer draws (their design effect), and no bias."""
    epochs = [epoch_of(1, epoch=epoch, chunk=chunk) for epoch in range(6)]
    true = spread_of_true_permutations(1, 24)
    effect = np.sqrt(1 + chunk / 24)
    between = [measures.correlation(one, other) for one, other in pairwise(epochs)]
    assert max(map(abs, between)) < 6 * effect * true["correlation"].std()
    assert abs(np.mean(between)) < 4 * effect * true["correlation"].std()
    assert all(measures.by_row(one, 24) < true["by_row"].mean() + 8 * true["by_row"].std() for one in epochs)
    assert all(measures.pairs_met(one, 8) == 1 for one in epochs)
    assert abs(np.mean([measures.neighbour_distance(one) for one in epochs]) - 1 / 3) < 0.02


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_take_whole_chunks_but_other_ones_in_every_epoch(nodes):
    """Counts of parts by rank come in steps of a chunk; over epochs they even out, but for a node's share."""
    ranks, chunk = 8, 16
    epochs = [epoch_of(ranks, epoch=epoch, chunk=chunk, nodes=nodes) for epoch in range(6)]
    samples = epochs[0].size
    one = np.mean([measures.by_rank(each) for each in epochs])
    all_together = measures.chi_square(np.concatenate(epochs, axis=1), samples)
    if nodes == 1:
        assert one < 1.5 * chunk
        assert all_together < 2 * chunk  # a rank that kept its parts would have six times one epoch's
    else:
        assert all_together > 4 * one  # half of the corpus is never a rank's: the share that its node keeps
        halves = np.concatenate(epochs, axis=1) * 2 // samples
        assert (halves[:4] == halves[0, 0]).all()


def test_a_row_of_a_batch_sees_the_whole_corpus():
    """With batches of as many rows as lanes, a row once saw one or two parts of 24 in five epochs."""
    for epoch in range(2):
        rows = epoch_of(1, chunk=64, epoch=epoch)[0].reshape(-1, 24) * 24 // SAMPLES
        assert all(len(np.unique(row)) == 24 for row in rows.T)
