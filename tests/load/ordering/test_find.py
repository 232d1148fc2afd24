"""The order read backwards: a sample is found where it is drawn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.load.ordering.blend import dealing_of, make_blend
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.find import positions_of
from stoker.load.ordering.order import Order
from stoker.load.ordering.spans import Elastic
from stoker.mixing import permuted, unpermuted


@given(size=st.integers(1, 1 << 40), number=st.integers(0, 1 << 40), key=st.integers(0, (1 << 64) - 1))
def test_a_permutation_is_undone(size, number, key):
    assert unpermuted(permuted(number % size, size, key), size, key) == number % size


@given(
    samples=st.integers(1, 20_000),
    chunk=st.sampled_from([1, 7, 64]),
    window=st.integers(1, 3),
    stretch=st.sampled_from([3, 16, 512]),
    world=st.integers(1, 6),
    seed=st.integers(0, 1 << 32),
    shuffle=st.sampled_from(["full", "blocks", "off"]),
    data=st.data(),
)
def test_a_sample_is_found_where_it_is_drawn(samples, chunk, window, stretch, world, seed, shuffle, data):
    cut = Cut.for_world(world, data.draw(st.sampled_from([1, world])))
    order = Order(
        samples=samples, chunk=chunk, window=window, stretch=stretch, cut=cut, seed=seed, shuffle=shuffle
    )
    for _ in range(data.draw(st.integers(0, 2)) if shuffle != "off" else 0):
        position = data.draw(st.integers(0, samples))
        cut = cut.resumed(data.draw(st.integers(1, 8)), 1, epoch=0, position=position)
    lanes = Elastic(order, cut)
    for epoch in (0, 1):
        at = data.draw(st.integers(0, samples - 1))
        sample = int(lanes.draw(range(at, at + 1), epoch=epoch).sample[0])
        assert positions_of(lanes, 0, sample, epoch=epoch) == [at]


@pytest.mark.long
@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 200), min_size=2, max_size=3), data=st.data())
def test_every_place_of_a_sample_in_a_blend_is_found(sizes, data):
    orders = tuple(Order(samples=size, chunk=3, seed=number) for number, size in enumerate(sizes))
    blend = make_blend(orders, dealing_of(tuple(range(1, len(sizes) + 1))))
    epoch, at = data.draw(st.integers(0, 2)), data.draw(st.integers(0, blend.positions - 1))
    drawn = blend.draw(range(blend.positions), epoch=epoch)
    which, sample = int(drawn.dataset[at]), int(drawn.sample[at])
    expected = ((drawn.dataset == which) & (drawn.sample == sample)).nonzero()[0].tolist()
    assert positions_of(blend, which, sample, epoch=epoch) == expected
