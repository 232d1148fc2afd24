"""Mixtures: counts are the integral of the weights, within one sample, on any number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.load.ordering.blend import make_blend
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.dealing import Dealing, Stage, earliest_deadline_first, earliest_in_python
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.order import Order
from stoker.load.ordering.rounds import Share
from stoker.load.ordering.schedule import Mixture, Schedule

TOLERANCE = 1 + 1e-6  # of floating point


@st.composite
def mixtures(draw, datasets=None):
    datasets = datasets or draw(st.integers(2, 7))
    weight = st.sampled_from([0.0, 1.0, 0.001, 0.3]) | st.floats(0.0, 1.0)
    weights = st.lists(weight, min_size=datasets, max_size=datasets).filter(lambda some: sum(some) > 0.01)
    points = draw(st.dictionaries(st.integers(0, 3000), weights, min_size=1, max_size=4))
    return Mixture(points, between=draw(st.sampled_from(["linear", "step"])))


def dealing_of(mixture: Mixture) -> Dealing:
    schedule = Schedule(mixture=mixture)
    return Dealing(stages=(Stage(begin=0, counts=(0,) * mixture.datasets, schedule=schedule),))


def integral(mixture: Mixture, position: int) -> np.ndarray:
    """By summing up shares, slowly, as one who reads the guide would."""
    points = [(at, np.array(weights) / sum(weights)) for at, weights in mixture.points.items()]
    total = np.zeros(mixture.datasets)
    for place in np.arange(position) + 0.5:  # shares are linear, so the middle is the mean
        before = [one for one in points if one[0] <= place]
        after = [one for one in points if one[0] > place]
        if not before or not after or mixture.between == "step":
            total += (before[-1] if before else points[0])[1]
        else:
            (low, first), (high, last) = before[-1], after[0]
            total += first + (last - first) * (place - low) / (high - low)
    return total


@settings(max_examples=40)
@given(mixture=mixtures(), position=st.integers(1, 4000))
def test_a_schedule_integrates_its_weights(mixture, position):
    found = Schedule(mixture=mixture).integral([position])[:, 0]
    assert found == pytest.approx(integral(mixture, position), abs=1e-6)


@settings(max_examples=60)
@given(mixture=mixtures(), positions=st.integers(1, 40_000))
def test_counts_are_the_integral_within_one_sample_at_every_position(mixture, positions):
    dataset, number = dealing_of(mixture).deal(range(positions))
    came = np.stack([np.cumsum(dataset == which) for which in range(mixture.datasets)])
    belong = Schedule(mixture=mixture).integral(np.arange(1, positions + 1))
    assert np.abs(came - belong).max() < TOLERANCE
    for which in range(mixture.datasets):  # each sample of a dataset in its turn
        assert (number[dataset == which] == np.arange(came[which, -1])).all()


@settings(max_examples=40)
@given(mixture=mixtures(), start=st.integers(0, 60_000), length=st.integers(0, 3000))
def test_any_stretch_is_dealt_as_in_the_whole_also_from_saved_counts(mixture, start, length):
    whole = dealing_of(mixture)
    dataset, number = whole.deal(range(start + length))
    resumed = Dealing(stages=whole.stages, known=whole.anchor(start))
    for dealing in (dealing_of(mixture), resumed):
        found = dealing.deal(range(start, start + length))
        assert (found[0] == dataset[start:]).all()
        assert (found[1] == number[start:]).all()


@settings(max_examples=30)
@given(
    mixture=mixtures(datasets=3),
    changes=st.lists(st.tuples(st.integers(1, 20_000), mixtures(datasets=3)), max_size=3),
)
def test_weights_that_change_at_a_resume_go_on_from_the_counts_reached(mixture, changes):
    dealing, begin = dealing_of(mixture), 0
    for length, other in changes:
        begin += length
        stage = Stage(begin=begin, counts=dealing.counts(begin), schedule=Schedule(mixture=other))
        dealing = Dealing(stages=(*dealing.stages, stage))
    dataset, number = dealing.deal(range(begin + 5000))
    for which in range(3):
        mine = number[dataset == which]
        assert (mine == np.arange(len(mine))).all()
    last = dealing.stages[-1]
    came = np.stack([np.cumsum(dataset[begin:] == which) for which in range(3)])
    belong = last.schedule.integral(np.arange(begin + 1, begin + 5001)) - last.schedule.integral([begin])
    assert np.abs(came - belong).max() < TOLERANCE


@settings(max_examples=40)
@given(mixture=mixtures(), slots=st.integers(1, 300))
def test_the_extension_deals_as_python_does(mixture, slots):
    belong = Schedule(mixture=mixture).integral(np.arange(slots + 1))
    came = np.zeros(mixture.datasets, np.int64)
    dues = [np.append(np.searchsorted(row, np.arange(1, int(row[-1]) + 1)), 10**9) for row in belong]
    expected = earliest_in_python(belong, came, dues)
    assert (earliest_deadline_first(np.ascontiguousarray(belong), came, dues) == expected).all()


@pytest.mark.long
@settings(max_examples=25)
@given(
    sizes=st.lists(st.integers(30, 400), min_size=2, max_size=4),
    worlds=st.lists(st.integers(1, 16), min_size=1, max_size=3),
    batch=st.integers(1, 9),
    data=st.data(),
)
def test_a_mixture_is_exact_on_any_number_of_ranks_across_resumes(sizes, worlds, batch, data):
    mixture = data.draw(mixtures(datasets=len(sizes)))
    orders = tuple(
        Order(samples=n, chunk=5, cut=Cut.for_world(worlds[0], 1), seed=number)
        for number, n in enumerate(sizes)
    )
    dealing, position, seen = dealing_of(mixture), 0, list[Draw]()
    for world in worlds:  # each goes on where the one before ended, with counts as a state keeps them
        dealing = Dealing(stages=dealing.stages, known=dealing.anchor(position))
        shares = [Share(rank=rank, world=world, batch=batch) for rank in range(world)]
        steps = min(4, (sum(sizes) - position) // (world * batch))
        for step in range(steps):
            start = position + step * world * batch
            for share in shares:
                seen.append(make_blend(orders, dealing, share=share).deal(share.rows(start, 1), epoch=0))
            drawn = Draw.join(seen)
            stop = start + world * batch
            belong = Schedule(mixture=mixture).integral([stop])[:, 0]
            came = np.bincount(drawn.dataset, minlength=len(sizes))
            assert np.abs(came - belong).max() < TOLERANCE
        position += steps * world * batch
    drawn = Draw.join(seen)
    for which, size in enumerate(sizes):  # a dataset's samples come once before one comes again
        mine = drawn.sample[drawn.dataset == which]
        counts = np.bincount(mine, minlength=size)
        assert counts.max() - counts.min() <= 1


@pytest.mark.long
@pytest.mark.parametrize(("world", "batch"), [(2, 8), (8, 8), (16, 4), (5, 16)])
def test_ranks_of_a_blend_read_hardly_more_than_their_share(world, batch):
    samples, chunk = 60_000, 64
    cut = Cut.for_world(world, 1)
    orders = tuple(Order(samples=samples, chunk=chunk, cut=cut, seed=seed) for seed in range(3))
    dealing = dealing_of(Mixture({0: [0.6, 0.3, 0.1]}))
    steps, read = samples // (world * batch), 0
    for rank in range(world):
        share = Share(rank=rank, world=world, batch=batch)
        blend = make_blend(orders, dealing, share=share)
        read += sum(stop - first for _, first, stop in blend.deal(share.rows(0, steps), epoch=0).keys)
    assert read <= 1.3 * steps * world * batch


@pytest.mark.parametrize(
    "points", [{}, {0: [0, 0]}, {0: [1, -1]}, {-1: [1, 1]}, {0: [1, 1], 5: [1]}, {0: [float("nan"), 1]}]
)
def test_points_that_cannot_be_are_refused(points):
    with pytest.raises(UsageError, match="points of a mixture"):
        Mixture(points)
