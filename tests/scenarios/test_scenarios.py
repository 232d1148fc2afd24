"""Faults really put into jobs, seen through `stoker watch`, named by `stoker diagnose`.

The quick ones run always; `pytest -m slow tests/scenarios` runs the rest, as a nightly job would.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import surroundings

from scenarios import SCENARIOS, Scenario, watched
from stoker.diagnose.rules import judge

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.integration

CROWDED = 0.3  # cores busy with others' work: contention is then a right answer too


def marks(scenario: Scenario) -> list[pytest.MarkDecorator]:
    return [pytest.mark.slow] if scenario.slow else []


@pytest.mark.parametrize("scenario", [pytest.param(one, id=one.name, marks=marks(one)) for one in SCENARIOS])
def test_a_fault_is_named_and_no_other(
    scenario: Scenario,
    tmp_path: Path,
    stoker_environ: Callable[..., dict[str, str]],
    request: pytest.FixtureRequest,
) -> None:
    if scenario.machine in surroundings.NEED_ROOT:
        request.getfixturevalue("need_root")
    seen = watched(scenario, tmp_path, environ=stoker_environ())
    found = judge(seen).findings
    assert sorted(one.kind for one in found) == sorted(scenario.kinds)
    others = seen.host.others if seen.host else 0.0
    if scenario.causes and others < CROWDED:
        assert found[0].cause in scenario.causes
