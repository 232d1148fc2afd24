"""Change points: a planted slowdown is found, quiet series of every kind stay quiet."""

from __future__ import annotations

import numpy as np
import pytest
from made_history import quiet, slowed
from quiet_series import FAMILIES, made

from stoker.history.changes import RECENT, find_changes
from stoker.history.series import regressions

from test_history_check import series_of  # isort: skip


def test_a_slowdown_of_five_percent_in_two_percent_noise_is_found_within_six_runs() -> None:
    found = 0
    for seed in range(100):
        values = slowed(60, 6, seed)
        found += any(
            change.after < change.before and abs(change.index - 60) <= 3
            for last in range(1, 7)
            for change in find_changes(values[: 60 + last])
        )
    assert found >= 90


@pytest.mark.parametrize("family", FAMILIES)
def test_quiet_series_stay_quiet(family: str) -> None:
    """A hundred of each here; a thousand, and beside Otava, in benchmarks/history_check.py."""
    alarms = sum(bool(regressions([series_of(made(family, 60, seed))])) for seed in range(100))
    assert alarms <= 2  # 1% expected at most: of a hundred more than two are a sign (p < 0.08)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_thousand_quiet_series_at_most_one_percent_raise_an_alarm(family: str) -> None:
    alarms = sum(bool(regressions([series_of(made(family, 60, seed))])) for seed in range(1000))
    assert alarms <= 10


def test_where_it_changed_and_by_how_much() -> None:
    (change,) = find_changes(slowed(30, 15, by=0.2))
    assert change.index == 30
    assert change.ratio == pytest.approx(0.8, abs=0.02)


def test_a_change_and_its_repair_are_two() -> None:
    values = quiet(60)
    values[20:40] *= 1.2
    assert [one.index for one in find_changes(values)] == [20, 40]


@pytest.mark.parametrize("last", [1, 2])
def test_one_bad_night_or_two_are_no_change(last: int) -> None:
    assert find_changes(slowed(40, last, by=0.5)) == []


def test_a_bad_night_in_the_midst_is_no_change() -> None:
    values = quiet(60)
    values[30] *= 3
    assert find_changes(values) == []


def test_counts_that_never_vary_change_when_they_do() -> None:
    assert [one.index for one in find_changes([5.0] * 20 + [6.0] * 6)] == [20]
    assert find_changes([5.0] * 20 + [6.0]) == []


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [1.0] * 50, [0.0] * 9, [1e308, -1e308] * 10])
def test_short_still_and_extreme_series_are_no_trouble(values: list[float]) -> None:
    with np.errstate(all="ignore"):
        assert find_changes(values) == []


def test_the_same_series_always_gets_the_same_answer() -> None:
    assert find_changes(slowed(30, 6, 3)) == find_changes(slowed(30, 6, 3))


def test_scale_and_offset_do_not_matter() -> None:
    values = slowed(40, 10)
    assert [one.index for one in find_changes(values)] == [one.index for one in find_changes(values * 1e-9)]


def test_recent_is_what_a_check_is_about() -> None:
    assert RECENT == 10
