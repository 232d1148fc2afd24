"""The order of samples: exactly once, for any world, from any cursor, and well mixed."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.mixing import key_of, permutation, permuted
from stoker.ordering.blend import make_blend
from stoker.ordering.order import Cut, Order, Share

orders = st.builds(
    Order,
    samples=st.integers(0, 700),
    chunk=st.integers(1, 40),
    cut=st.builds(
        Cut, lanes=st.sampled_from([1, 2, 3, 7, 12, 24]), ranks=st.integers(1, 8), nodes=st.integers(1, 4)
    ),
    stretch=st.integers(1, 5),
    window=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.sampled_from(["full", "blocks", "off"]),
)


def whole_epoch(order, epoch=0):
    return order.draw(range(order.positions), epoch=epoch)


@given(order=orders, epoch=st.integers(0, 5))
def test_every_sample_comes_exactly_once_per_epoch(order, epoch):
    assert sorted(whole_epoch(order, epoch).sample.tolist()) == list(range(order.samples))


@given(order=orders)
def test_a_sample_lies_in_the_chunk_it_is_read_with(order):
    drawn = whole_epoch(order)
    first, stop = np.array([key[1:] for key in drawn.keys], int).reshape(-1, 2)[drawn.chunk].T
    assert ((first <= drawn.sample) & (drawn.sample < stop)).all()
    assert (stop - first <= order.chunk).all()
    assert (stop <= order.samples).all()


@given(order=orders, data=st.data())
def test_any_position_can_be_asked_for_alone(order, data):
    if not order.samples:
        return
    position = data.draw(st.integers(0, order.samples - 1))
    alone = order.draw(range(position, position + 1), epoch=3)
    assert alone.sample[0] == whole_epoch(order, 3).sample[position]


@given(order=orders, world=st.integers(1, 9), batch=st.integers(1, 5), tail=st.sampled_from(["drop", "pad"]))
def test_ranks_get_as_many_batches_and_share_every_sample_out(order, world, batch, tail):
    seen = []
    for rank in range(world):
        share = Share(rank=rank, world=world, batch=batch)
        count = share.batches(order.positions, tail=tail)
        rows = np.array(share.rows(0, count), int)
        assert len(rows) == count * batch
        seen.append(rows[rows < order.positions])
    wanted = order.positions if tail == "pad" else order.positions // (world * batch) * (world * batch)
    assert sorted(np.concatenate(seen).tolist()) == list(range(wanted))


@given(
    order=orders,
    first=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    then=st.tuples(st.integers(1, 6), st.integers(1, 4)),
    steps=st.integers(0, 20),
)
def test_a_cursor_resumes_on_another_world_size_without_loss_or_repeat(order, first, then, steps):
    cursor = (
        min(steps, Share(rank=0, world=first[0], batch=first[1]).batches(order.positions))
        * first[0]
        * first[1]
    )
    rest = []
    for rank in range(then[0]):
        share = Share(rank=rank, world=then[0], batch=then[1])
        rows = share.rows(cursor, share.batches(order.positions, start=cursor, tail="pad"))
        rest.append(np.array(rows, int))
    positions = np.concatenate(rest)
    assert sorted(positions[positions < order.positions].tolist()) == list(range(cursor, order.positions))


@given(world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), seed=st.integers(0, 99))
def test_a_rank_reads_its_own_lanes_only(world, seed):
    order = Order(samples=24 * 50, chunk=5, seed=seed)
    chunks = [
        set(order.draw(Share(rank=r, world=world, batch=2).rows(0, 1200 // world // 2), epoch=1).keys)
        for r in range(world)
    ]
    assert sum(map(len, chunks)) == len(set().union(*chunks)) == 240


@given(world=st.integers(1, 300))
def test_default_lanes_suit_the_world_and_small_ones(world):
    lanes = Cut.for_world(world, 1).lanes
    assert lanes % world == 0
    assert lanes % 8 == 0


@settings(max_examples=8)
@given(
    sizes=st.lists(st.integers(24, 300), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    data=st.data(),
)
def test_a_blend_keeps_its_weights_and_each_dataset_its_epochs(sizes, seed, data):
    weights = tuple(data.draw(st.floats(0.05, 1.0)) for _ in sizes)
    blend = make_blend(
        tuple(Order(samples=n, chunk=7, cut=Cut(lanes=4), seed=seed) for n in sizes), weights, seed=seed
    )
    drawn = blend.draw(range(blend.lanes * 4096), epoch=0)
    for which in range(len(sizes)):
        mine = drawn.sample[drawn.dataset == which]
        assert abs(len(mine) / len(drawn) - weights[which] / sum(weights)) < 0.01
        counts = np.bincount(mine, minlength=sizes[which])
        # each lane goes through its samples evenly: none is ever a whole epoch ahead of its lane
        order = blend.orders[which]
        for lane in range(blend.lanes):
            start = order.lane_start(lane)
            assert np.ptp(counts[start : start + order.lane_size(lane)]) <= 1


def test_a_blend_goes_on_where_its_last_epoch_ended():
    blend = make_blend((Order(samples=100, chunk=7), Order(samples=60, chunk=7)), (0.7, 0.3), seed=5)
    two = blend.draw(range(2 * blend.positions), epoch=0)
    second = blend.draw(range(blend.positions), epoch=1)
    assert two.sample[blend.positions :].tolist() == second.sample.tolist()


@pytest.mark.parametrize("weights", [(1.0,), (0.0, 1.0), (float("nan"), 1.0)])
def test_a_blend_that_cannot_be_is_refused(weights):
    with pytest.raises(UsageError):
        make_blend((Order(samples=100), Order(samples=100)), weights)


@given(order=orders, start=st.integers(0, 800), step=st.integers(1, 40), count=st.integers(0, 60))
def test_rows_far_apart_are_drawn_as_in_the_whole(order, start, step, count):
    rows = range(start, min(order.samples, start + step * count), step)
    assert (
        order.draw(rows, epoch=2).sample.tolist()
        == whole_epoch(order, 2).sample[np.array(rows, int)].tolist()
    )


@given(size=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_permutations_hold_every_number_once(size, key):
    assert sorted(permutation(size, key).tolist()) == list(range(size))
    assert sorted(permuted(number, size, key) for number in range(size)) == list(range(size))


def test_a_permutation_is_as_random_as_chance():
    """Each number at each place about equally often: chi-squared within what chance gives."""
    size, trials = 20, 20_000
    counts = np.zeros((size, size))
    for trial in range(trials):
        counts[np.arange(size), permutation(size, key_of(trial))] += 1
    expected = trials / size
    chi_squared = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi_squared - (size - 1) ** 2) < 5 * np.sqrt(2) * (size - 1)


def test_seeds_and_epochs_give_other_orders():
    order = Order(samples=5000, chunk=50)
    first, second = whole_epoch(order, 0).sample, whole_epoch(order, 1).sample
    other = whole_epoch(Order(samples=5000, chunk=50, seed=1), 0).sample
    assert (first == second).mean() < 0.01
    assert (first == other).mean() < 0.01


def test_the_mixing_is_close_to_a_uniform_permutation():
    samples, shards, batch = 100_000, 20, 8
    order = Order(samples=samples, chunk=1024, seed=3)
    drawn = whole_epoch(order).sample
    uniform = np.random.default_rng(0).permutation(samples)
    ours, ideal = (distinct_shards(o, samples // shards, batch) for o in (drawn, uniform))
    assert ours > 0.97 * ideal
    gaps = [np.abs(np.diff(o)).mean() / samples for o in (drawn, uniform)]
    assert gaps[0] > 0.95 * gaps[1]
    assert abs(np.corrcoef(np.arange(samples), drawn)[0, 1]) < 0.05


def test_a_wider_window_spreads_a_chunk_further():
    spreads = []
    for window in (1, 4):
        drawn = whole_epoch(Order(samples=96_000, chunk=500, window=window)).sample
        # a few chunks lie across the ends of an epoch: the median is not one of them
        spreads.append(np.median([np.ptp(np.flatnonzero(drawn // 500 == chunk)) for chunk in range(40, 61)]))
    assert spreads[1] > 2 * spreads[0]


def distinct_shards(order, shard, batch):
    whole = order[: len(order) // batch * batch].reshape(-1, batch) // shard
    return np.mean([len(set(row)) for row in whole[:2000].tolist()])


def test_a_corpus_of_1e11_tokens_starts_in_milliseconds_and_holds_nothing():
    order = Order(samples=10**11 // 2048, chunk=512)
    positions = range(order.samples // 2, order.samples // 2 + 1024)
    order.draw(positions[:8], epoch=0)
    tracemalloc.start()
    begin = time.process_time()
    order.draw(positions, epoch=7)
    seconds, (_, peak) = time.process_time() - begin, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.1
    assert peak < 2 << 20


def test_an_unknown_shuffle_is_refused():
    with pytest.raises(UsageError, match="shuffle"):
        Order(samples=1, shuffle="some")
