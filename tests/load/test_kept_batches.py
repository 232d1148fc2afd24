"""A job that goes on with another version gets the batches it would have got (`kept_batches.py`)."""

from __future__ import annotations

import json

import pytest
from kept_batches import DRAWN, KEPT, asked, of_tars, ran, refusals

from kept_values import alike, kept

BATCHES, REFUSALS = kept(KEPT / "batches.json"), kept(KEPT / "refusals.json")


@pytest.mark.parametrize("seed", range(DRAWN))
def test_batches_states_and_ledgers_are_what_they_were(seed):
    found, was = ran(seed), BATCHES[str(seed)]
    assert found.keys() == was.keys()
    for part, one in was.items():
        assert alike(one, found[part]), f"{part}: {found[part]}\nwas {one}"


def test_samples_of_tars_come_in_the_order_in_which_they_came():
    assert json.loads(json.dumps(of_tars())) == BATCHES["tars"]


def test_a_state_that_cannot_be_is_answered_as_it_was():
    found = refusals()
    assert found.keys() == REFUSALS["states"].keys()
    assert [(key, found[key], was) for key, was in REFUSALS["states"].items() if found[key] != was] == []


def test_an_option_that_cannot_be_is_answered_as_it_was():
    found = asked()
    assert [(key, found[key], was) for key, was in REFUSALS["options"].items() if found[key] != was] == []
