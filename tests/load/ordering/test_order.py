"""The order of samples: exactly once, for any world, from any cursor, and well mixed."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.load.ordering.blend import dealing_of, make_blend
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.order import Order
from stoker.load.ordering.rounds import Share
from stoker.load.ordering.spans import Elastic
from stoker.load.state import cut_of
from stoker.mixing import key_of, permutation, permuted

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


@pytest.mark.long
@given(
    world=st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 24]),
    nodes=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_a_rank_reads_its_own_lanes_only(world, nodes, seed):
    order = Order(samples=48 * 50, chunk=5, seed=seed, cut=Cut.for_world(world, nodes))
    shares = [Share(rank=r, world=world, batch=2).rows(0, 2400 // world // 2) for r in range(world)]
    chunks = [set(order.deal(share, epoch=1).keys) for share in shares]
    assert sum(map(len, chunks)) == len(set().union(*chunks))


@settings(max_examples=40)
@given(order=orders, worlds=st.sampled_from([(1, 2, 4), (1, 3), (1, 2, 4, 8)]), batch=st.integers(1, 5))
def test_all_worlds_that_share_lanes_out_see_the_same_global_batches(order, worlds, batch):
    size = math.lcm(*worlds) * batch
    seen = []
    for world in worlds:
        shares = [Share(rank=rank, world=world, batch=size // world) for rank in range(world)]
        count = shares[0].batches(order.positions)
        dealt = [
            order.deal(share.rows(0, count), epoch=1).sample.reshape(count, share.batch) for share in shares
        ]
        seen.append(np.sort(np.concatenate(dealt, axis=1), axis=1).tolist())
    assert all(one == seen[0] for one in seen)


@pytest.mark.long
@settings(max_examples=30)
@given(
    samples=st.integers(40, 900),
    chunk=st.integers(1, 20),
    stretch=st.integers(1, 5),
    jobs=st.lists(
        st.tuples(st.integers(1, 9), st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=5
    ),
    epoch=st.integers(0, 2),
)
def test_jobs_of_any_worlds_one_after_the_other_get_every_sample_once(samples, chunk, stretch, jobs, epoch):
    cut = Cut.for_world(jobs[0][0], 1)
    order = Order(samples=samples, chunk=chunk, stretch=stretch, cut=cut, seed=samples)
    position, seen = 0, []
    for world, batch, steps in jobs:
        cut = cut_of(json.loads(json.dumps(cut.as_state())))
        cut = cut.resumed(world, 1, epoch=epoch, position=position)
        lanes, shares = Elastic(order, cut), [Share(rank=r, world=world, batch=batch) for r in range(world)]
        steps = min(steps, shares[0].batches(samples, start=position))
        for share in shares:
            seen += lanes.deal(share.rows(position, steps), epoch=epoch).sample.tolist()
        position += steps * world * batch
    seen += lanes.draw(range(position, samples), epoch=epoch).sample.tolist()
    assert sorted(seen) == list(range(samples))
    assert sorted(lanes.draw(range(samples), epoch=epoch + 1).sample.tolist()) == list(range(samples))


@pytest.mark.long
def test_a_job_that_changed_its_ranks_two_hundred_times_still_gets_every_sample_once():
    samples = 30_000
    order = Order(samples=samples, chunk=8, cut=Cut.for_world(4, 1), seed=1)
    cut, position, seen = order.cut, 0, []
    for number in range(200):
        world = (5, 4)[number % 2]
        cut = cut.resumed(world, 1, epoch=0, position=position)
        position += 3 * world
    whole = Elastic(order, cut)
    edges = [recut.position for recut in cut.then] + [samples]
    for begin, end in pairwise([0, *edges]):
        seen += whole.draw(range(begin, end), epoch=0).sample.tolist() if begin < end else []
    assert sorted(seen) == list(range(samples))


def test_of_epochs_that_are_over_only_the_latest_cut_is_kept():
    cut = Cut.for_world(4, 1)
    for epoch, world in enumerate((5, 7, 5, 7)):
        cut = cut.resumed(world, 1, epoch=epoch, position=9)
    assert [recut.epoch for recut in cut.then] == [2, 3]
    assert cut.cuts_of(3)[0].ranks == 5


@pytest.mark.parametrize(("before", "after"), [(64, 56), (4, 5), (4, 7), (4, 16), (1, 3)])
@pytest.mark.parametrize("batch", [1, 8])
def test_going_on_with_other_ranks_reads_hardly_more(before, after, batch):
    samples, chunk = 300_000, 64
    order = Order(samples=samples, chunk=chunk, cut=Cut.for_world(before, 1), seed=5)
    position = samples // 3 // (before * 8) * before * 8
    for epoch, start in ((0, position), (1, 0)):
        lanes = Elastic(order, order.cut.resumed(after, 1, epoch=0, position=position))
        steps = (samples - start) // (after * batch)
        rows = [Share(rank=r, world=after, batch=batch).rows(start, steps) for r in range(after)]
        read = sum(stop - first for mine in rows for _, first, stop in lanes.deal(mine, epoch=epoch).keys)
        assert read <= 1.3 * steps * after * batch


@given(world=st.integers(1, 300))
def test_default_lanes_suit_the_world_and_small_ones(world):
    lanes = Cut.for_world(world, 1).lanes
    assert lanes % world == 0
    assert lanes % 8 == 0


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=4),
    seed=st.integers(0, 2**32),
    lanes=st.sampled_from([1, 4, 24]),
    data=st.data(),
)
def test_a_blend_keeps_its_weights_and_each_dataset_its_epochs(sizes, seed, lanes, data):
    weights = tuple(data.draw(st.floats(0.05, 1.0)) for _ in sizes)
    orders = tuple(Order(samples=n, chunk=7, cut=Cut(lanes=lanes), seed=seed) for n in sizes)
    blend = make_blend(orders, dealing_of(weights))
    epochs = -(-1500 // blend.positions)
    drawn = Draw.join(blend.draw(range(blend.positions), epoch=epoch) for epoch in range(epochs))
    for which, size in enumerate(sizes):
        mine = drawn.sample[drawn.dataset == which]
        assert abs(len(mine) - len(drawn) * weights[which] / sum(weights)) < 1 + 1e-9
        # the first so many draws of a dataset are all of its samples, and so are the next
        for first in range(0, len(mine), size):
            assert len(set(mine[first : first + size].tolist())) == len(mine[first : first + size])


@pytest.mark.long
def test_ranks_of_a_blend_share_out_its_global_batches():
    orders = tuple(Order(samples=n, chunk=7, cut=Cut.for_world(4, 2)) for n in (500, 90, 3))
    shares = [Share(rank=r, world=4, batch=5) for r in range(4)]
    blends = [make_blend(orders, dealing_of((0.6, 0.3, 0.1)), share=share) for share in shares]
    whole = blends[0].draw(range(480), epoch=2)
    rows = [share.rows(0, 24) for share in shares]
    dealt = Draw.join(blend.deal(mine, epoch=2) for blend, mine in zip(blends, rows, strict=True))
    assert sorted(zip(dealt.dataset.tolist(), dealt.sample.tolist(), strict=True)) == sorted(
        zip(whole.dataset.tolist(), whole.sample.tolist(), strict=True)
    )


@pytest.mark.parametrize("weights", [(1.0,), (0.0, 1.0), (float("nan"), 1.0)])
def test_a_blend_that_cannot_be_is_refused(weights):
    with pytest.raises(UsageError):
        make_blend((Order(samples=100), Order(samples=100)), dealing_of(weights))


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
        drawn = whole_epoch(Order(samples=96_000, chunk=250, window=window))
        # a few chunks lie across the ends of an epoch: the median is not one of them
        spreads.append(np.median([np.ptp(np.flatnonzero(drawn.chunk == chunk)) for chunk in range(20, 61)]))
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
