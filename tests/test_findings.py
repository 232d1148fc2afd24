"""Findings: checked when made, ordered by what they cost."""

from __future__ import annotations

import json

import pytest

from stoker.findings import Finding, worst_first


def test_the_costliest_comes_first() -> None:
    cheap = Finding(kind="cheap", summary="", share=0.1)
    dear = Finding(kind="dear", summary="", share=0.6)
    assert worst_first([cheap, dear]) == [dear, cheap]


def test_the_surer_of_two_equals_comes_first() -> None:
    sure = Finding(kind="z", summary="", share=0.5, confidence=0.9)
    unsure = Finding(kind="a", summary="", share=0.5, confidence=0.2)
    assert worst_first([unsure, sure]) == [sure, unsure]


@pytest.mark.parametrize(
    "wrong", [{"share": 1.1}, {"confidence": -0.1}, {"speedup_if_gone": 0.9}, {"gpu_seconds": -1.0}]
)
def test_an_impossible_cost_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must lie between 0 and 1|never less than nothing"):
        Finding(kind="x", summary="y", **wrong)


def test_a_finding_is_plain_json() -> None:
    found = Finding(kind="x", summary="y", evidence=("seen",))
    assert json.loads(json.dumps(found.as_dict()))["evidence"] == ["seen"]
