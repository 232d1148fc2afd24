"""Rows gathered in C and with numpy are the same, and nothing is read outside of the memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.load.assembly.gather import Gathering, rows_of

KINDS = [
    ("uint16", "int64"),
    ("uint16", "int32"),
    ("int32", "int64"),
    ("uint32", "int64"),
    ("uint16", "uint16"),
]


@given(
    kinds=st.sampled_from(
        [*KINDS, ("int64", "int64"), ("int16", "int64"), (">u2", "int64"), ("uint16", "float32")]
    ),
    seed=st.integers(0, 2**32 - 1),
    length=st.integers(1, 300),
    rows=st.integers(0, 9),
)
def test_rows_are_those_numpy_would_give(kinds: tuple[str, str], seed: int, length: int, rows: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 2**15, 400).astype(kinds[0])
    places = rng.integers(0, len(tokens) - length + 1, rows)
    into = np.empty((rows, length), kinds[1])
    gathering = Gathering(tokens, places, into.dtype)
    gathering.put(into)
    assert np.array_equal(into, rows_of(tokens, length)[places].astype(kinds[1]))
    gathering.put(some := np.zeros_like(into[rows // 2 :]), first=rows // 2)
    assert np.array_equal(some, into[rows // 2 :])


@pytest.mark.parametrize("place", [-1, 7])
@pytest.mark.parametrize(("narrow", "wide"), KINDS)
def test_a_row_outside_of_the_memory_is_refused(place: int, narrow: str, wide: str) -> None:
    with pytest.raises(IndexError):
        Gathering(np.zeros(10, narrow), np.array([0, place]), np.dtype(wide)).put(np.empty((2, 4), wide))


def test_the_largest_and_smallest_tokens_keep_their_value() -> None:
    tokens = np.array([0, 2**15, 2**16 - 1], np.uint16)
    into = np.empty((1, 3), np.int64)
    Gathering(tokens, np.array([0]), into.dtype).put(into)
    assert into.tolist() == [[0, 32768, 65535]]
