"""The gate's matrix: bad nodes are stopped, by the check that is meant; good ones are let through."""

from __future__ import annotations

import pytest
from gate_machines import CASES, JOBS, Case

from stoker.doctor.examine import examine


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_job_starts_where_it_can_and_nowhere_else(case: Case, job: str) -> None:
    results = examine(case.make(), need=JOBS[job])
    failed = {result.check.name: result.seen.read for result in results if result.level == "fail"}
    assert set(failed) == set(case.stops.get(job, ())), failed


def test_thirty_machines_stand_before_four_jobs() -> None:
    assert (len(CASES) >= 30, len(JOBS)) == (True, 4)
    assert len({case.name for case in CASES}) == len(CASES)
