"""The course of a job: what it keeps of mixtures, of what is left out, and of the ranks it had."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker import World
from stoker.load.options import LoaderOptions
from stoker.load.ordering.plan import Cursor
from stoker.load.past import Past, dealing_of


def options_of(*, datasets=1, ranks=1, batch=2, tail="drop", weights=()):
    return LoaderOptions(
        [f"d{n}" for n in range(datasets)],
        batch_size=batch,
        weights=weights,
        tail=tail,
        world=World(size=ranks, local_size=ranks),
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 300))
def test_of_a_blend_so_many_samples_have_come_of_each_and_of_one_dataset_nothing_is_said(weights, position):
    options = options_of(datasets=len(weights), weights=tuple(map(float, weights)))
    counts = Past(dealing=dealing_of(Past(), options, position=0)).mixed(position)
    assert Past().mixed(position) == ()
    if len(weights) == 1:
        assert counts == ()
    else:
        assert sum(counts) == position
        for count, weight in zip(counts, weights, strict=True):
            assert abs(count - position * weight / sum(weights)) < len(weights)


SAMPLES = st.frozensets(st.tuples(st.integers(0, 1), st.integers(0, 9)))


@given(st.lists(SAMPLES, max_size=5))
def test_what_is_left_out_is_noted_once_with_the_place_where_that_began(asked):
    past, expected, known = Past(), [], set()
    for at, samples in enumerate(asked):
        past = past.without(samples, Cursor(position=at))
        if new := samples - known:
            expected.append((at, new))
            known |= new
    assert [(some.since.position, some.samples) for some in past.left_out] == expected


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(1, 2)), max_size=6))
def test_a_leg_begins_where_the_ranks_or_their_rows_change_and_one_of_no_steps_is_none(turns):
    past, by_step, step = Past(), {}, 0
    for steps, ranks, batch in turns:
        past = past.with_leg(Cursor(position=step), options_of(ranks=ranks, batch=batch))
        for one in range(step, step + steps):
            by_step[one] = (ranks, batch)
        step += steps
        past = Past(legs=past.legs, step=step)
    starts = [leg.step for leg in past.legs]
    assert starts == sorted(set(starts))
    assert all(leg.cursor.position == leg.step for leg in past.legs)
    for one, told in by_step.items():
        leg = [leg for leg in past.legs if leg.step <= one][-1]
        assert (leg.ranks, leg.batch) == told
