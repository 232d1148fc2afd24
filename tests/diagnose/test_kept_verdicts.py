"""What is read out of runs, said of them, and where that turns over: as kept (`kept_verdicts.py`)."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from kept_verdicts import KEPT, RUNS, across, said, seen

from kept_values import alike, kept, plain
from stoker.diagnose.rules import judge

READINGS, VERDICTS = (kept(KEPT / f"{name}.json") for name in ("readings", "verdicts"))
BORDERS = json.loads((KEPT / "borders.json").read_text("utf-8"))


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_read_as_it_was(name: str) -> None:
    read = plain(seen(name))
    for part, was in READINGS[name].items():
        assert alike(was, read[part]), f"{part}: {read[part]}\nwas {was}"
    assert read.keys() == READINGS[name].keys()


@pytest.mark.parametrize("name", RUNS)
def test_of_a_run_is_said_what_was_said(name: str) -> None:
    told = said(judge(seen(name)))
    for was, now in zip(VERDICTS[name], told, strict=True):
        assert alike(was, now), f"{now}\nwas {was}"


def _by_number() -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for border in BORDERS:
        found[border[1]].append(border)
    return found


@pytest.mark.parametrize("leaf", sorted(_by_number()))
def test_what_is_said_turns_over_at_its_border_and_on_the_kept_side_of_it(leaf: str) -> None:
    for border in _by_number()[leaf]:
        gone, new = across(border)
        assert [sorted(gone), sorted(new)] == border[4:], border[:4]
