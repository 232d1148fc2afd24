"""The loader state among what a job saved: found wherever it stands, and refused where it is not one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_datasets import make_tokens

from stoker import Loader
from stoker.errors import UsageError
from stoker.load.recall import the_state_in


@pytest.fixture(scope="module")
def states(tmp_path_factory):
    """Of three loaders: two before their first step, the second also after one."""
    corpus, found = make_tokens(tmp_path_factory.mktemp("recall") / "corpus", [[99] * 9]), []
    for seed in (0, 1):
        with Loader(corpus, batch_size=2, seq_len=16, seed=seed, workers="inline") as loader:
            found.append(loader.state_dict())
            if seed:
                next(iter(loader))
                found.append(loader.state_dict())
    return found


def around(inner):
    others = st.integers() | st.text() | st.none()
    return st.recursive(
        inner,
        lambda some: (
            st.tuples(st.lists(others, max_size=2), some).map(list)
            | st.fixed_dictionaries({"a": others, "b": some})
        ),
        max_leaves=3,
    )


@given(st.data(), st.lists(st.integers(0, 2), min_size=1, max_size=3))
def test_one_state_is_found_however_often_it_was_saved_and_of_several_none_is_chosen(states, data, which):
    held = [data.draw(around(st.just(states[one]))) for one in which]
    if len(set(which)) == 1:
        assert the_state_in(held, "here") == states[which[0]]
    else:
        with pytest.raises(UsageError, match=f"here holds {len(which)} loader states"):
            the_state_in(held, "here")


def test_where_there_is_none_that_is_said():
    with pytest.raises(UsageError, match="here holds no loader state"):
        the_state_in({"model": [1, {"order": 2}]}, "here")
