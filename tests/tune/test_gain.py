"""What pairs of windows prove, and what first losses show."""

from __future__ import annotations

import math
import random

import pytest

from stoker.tune.gain import DIFFER, SAME, UNSEEDED, UNSEEN, compare_losses, gain_of


def test_a_gain_is_the_same_however_the_machine_drifts() -> None:
    pairs = [(2.0 * drift, 1.0 * drift) for drift in (1.0, 1.3, 1.7)]
    gain = gain_of(pairs)
    assert gain.times == pytest.approx(2.0)
    assert gain.proven
    assert gain.settled


def test_one_pair_proves_nothing() -> None:
    assert not gain_of([(3.0, 1.0)]).proven


def test_pairs_that_contradict_each_other_prove_nothing() -> None:
    assert not gain_of([(1.5, 1.0), (1.0, 1.4), (1.6, 1.0)]).proven


def test_a_gain_too_small_to_be_worth_a_change_is_none() -> None:
    assert not gain_of([(1.01, 1.0), (1.011, 1.0), (1.009, 1.0)]).proven


def test_no_gain_is_claimed_more_often_than_the_interval_allows() -> None:
    draw = random.Random(7)
    claimed = sum(
        gain_of([(draw.lognormvariate(0, 0.05), draw.lognormvariate(0, 0.05)) for _ in range(3)]).proven
        for _ in range(2000)
    )
    assert claimed <= 0.035 * 2000  # one side of 95%, and a little


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draw = random.Random(8)
    held = 0
    for _ in range(1000):
        pairs = [(1.5 * draw.lognormvariate(0, 0.05), draw.lognormvariate(0, 0.05)) for _ in range(4)]
        gain = gain_of(pairs)
        held += gain.low <= 1.5 <= gain.high
    assert held >= 930


@pytest.mark.parametrize(
    ("plain", "tried", "said"),
    [
        ([[1.0, 0.9], [1.0, 0.9]], [1.0, 0.9], SAME),
        ([[1.0, 0.9], [1.0, 0.9]], [1.0 + 1e-6, 0.9], SAME),
        ([[1.0, 0.9], [1.0, 0.9]], [1.0, 0.8], DIFFER),
        ([[1.0, 0.9], [1.1, 0.9]], [1.0, 0.9], UNSEEDED),
        ([[1.0]], [2.0], UNSEEDED),
        ([[]], [2.0], UNSEEN),
        ([[1.0], [1.0]], [], UNSEEN),
        ([[math.nan], [math.nan]], [math.nan], SAME),
    ],
)
def test_losses_are_compared_where_two_unchanged_runs_agree(
    plain: list[list[float]], tried: list[float], said: str
) -> None:
    assert compare_losses(plain, tried) == said
