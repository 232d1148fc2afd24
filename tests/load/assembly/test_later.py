"""Batches that are gathered when they are asked for, beside a list of them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stoker.load.assembly.rows import Later


@given(st.integers(0, 9), st.integers(1, 4), st.lists(st.integers(0, 4), max_size=3), st.integers(-10, 9))
def test_they_are_a_list_of_what_is_made_a_few_at_a_time(batches, at_once, left_out, number):
    made = []

    def make(some):
        made.append(len(some))
        return [{"input_ids": one} for one in some]

    later, expected = Later(batches, make, at_once=at_once), [{"input_ids": one} for one in range(batches)]
    for first in left_out:
        later, expected = later[min(first, len(later)) :], expected[min(first, len(expected)) :]
    assert made == []  # nobody has asked
    assert len(later) == len(expected)
    assert list(later) == expected
    assert max(made, default=1) <= at_once
    if -len(expected) <= number < len(expected):
        assert later[number] == expected[number]
        assert later[number:][:2] == expected[number:][:2]
