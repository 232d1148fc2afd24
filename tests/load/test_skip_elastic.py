"""Documents are left out while the ranks of a job change: what is left out stays out, all else comes once."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stoker.load.loader import Loader
from stoker.world import World

Leg = tuple[int, int, int, list[int]]  # ranks, rows of each, batches, numbers to leave out from here on

legs = st.tuples(
    st.integers(1, 6), st.integers(1, 2), st.integers(0, 4), st.lists(st.integers(0, 10**6), max_size=2)
)


def ran(samples: int, seed: int, leg: Leg, state) -> tuple[list[tuple[int, int]], dict]:
    """The epoch and the number of each sample that comes in a leg, and the state after it."""
    ranks, rows, batches, named = leg
    seen, states = [], []
    for rank in range(ranks):
        loader = Loader(
            np.arange(samples), batch_size=rows, seed=seed, output="numpy", workers="inline",
            world=World(rank=rank, size=ranks), skip=[f"#{number % samples}" for number in named],
        )  # fmt: skip
        with loader:
            if state:
                loader.load_state_dict(state)
            came = 0
            while came < batches:
                epoch = loader.epoch
                for batch in loader:
                    came, epoch = came + 1, max(epoch, loader.samples(loader.step - 1)[0].epoch)
                    seen += [(epoch, int(number)) for number in batch]
                    if came == batches:
                        break
            states.append(json.dumps(loader.state_dict()))
    assert len(set(states)) == 1
    return seen, json.loads(states[0])


@pytest.mark.long
@settings(max_examples=25)
@given(samples=st.sampled_from([13, 40, 111]), seed=st.integers(0, 2**64 - 1), job=st.lists(legs, max_size=7))
# ranks that fit the lanes, after others had left a round of them half done
@example(samples=111, seed=3, job=[(1, 1, 2, []), (5, 1, 1, []), (1, 1, 2, [67]), (5, 1, 20, [])])
@example(samples=40, seed=5, job=[(5, 1, 1, []), (4, 1, 1, [36]), (5, 1, 1, []), (4, 1, 4, [])])
def test_what_is_left_out_stays_out_and_all_else_comes_once_whatever_the_ranks(samples, seed, job):
    seen, gone, state = Counter(), set(), None
    for leg in job:
        gone |= {number % samples for number in leg[3]}
        if samples - len(gone) < leg[0] * leg[1]:
            return  # too few for a batch, and refused
        some, state = ran(samples, seed, leg, state)
        assert not gone.intersection(number for _, number in some)
        seen.update(some)
        assert max(seen.values(), default=0) <= 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_leaving_out_what_has_come_already_keeps_the_rest_of_the_epoch(seed):
    """It has no gap then, and is not cut anew either."""
    first, state = ran(111, seed, (5, 1, 1, []), None)
    seen = Counter(first)
    for leg in ((4, 1, 1, [number for _, number in first]), (5, 1, 2, []), (4, 1, 9, []), (5, 1, 8, [])):
        some, state = ran(111, seed, leg, state)
        seen.update(some)
    assert max(seen.values()) == 1
    assert state["epoch"] == 0


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_a_position_after_ranks_changed_in_an_epoch_with_gaps_can_be_gone_on_from(ranks):
    _, state = ran(40, 0, (4, 1, 2, [7]), None)
    _, state = ran(40, 0, (ranks, 1, 1, []), state)
    some, _ = ran(40, 0, (1, 1, 39 - 8 - ranks, []), state)
    assert len({number for epoch, number in some if epoch == 0}) == 39 - 8 - ranks


def test_the_report_says_that_such_ranks_read_more():
    _, state = ran(20_000, 0, (5, 1, 1, [7]), None)
    _, state = ran(20_000, 0, (1, 1, 2, []), state)
    for ranks, factor in ((5, 4), (1, 1)):
        with Loader(np.arange(20_000), batch_size=1, world=World(size=ranks), workers="inline") as loader:
            loader.load_state_dict(state)
            assert int(loader.report().read_factor) == factor
