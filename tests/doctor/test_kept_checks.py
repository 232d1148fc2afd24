"""What checks see on recorded machines, and where that turns over: as kept (`kept_checks.py`)."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from typing import Any

import pytest
from kept_checks import KEPT, SCENES, across, said

from kept_values import kept

CHECKS = kept(KEPT / "checks.json")
TURNS: dict[str, list[Any]] = defaultdict(list)
for _turn in json.loads((KEPT / "turns.json").read_text("utf-8")):
    TURNS[re.split(r"[.\[]", _turn[1])[0]].append(_turn)


@pytest.mark.parametrize("name", SCENES)
def test_of_a_machine_is_said_what_was_said(name: str) -> None:
    assert said(name) == CHECKS[name]


@pytest.mark.parametrize("part", sorted(TURNS))
def test_what_a_check_sees_turns_over_at_its_limit_and_on_the_kept_side_of_it(part: str) -> None:
    for turn in TURNS[part]:
        assert across(turn) == turn[4:], turn[:4]
