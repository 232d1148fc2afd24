"""One table of needs: what plan fills, doctor judges and deploy renders has the same names and values."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest

from stoker.doctor.need import SHM_A_GPU, Need, read_need
from stoker.plan.arithmetic import make_plan
from stoker.plan.job import Job

if TYPE_CHECKING:
    from pathlib import Path

JOB = Job(parameters=7e9, batch=4, sample=8192, tokens=4096, nodes=4, gpus_per_node=8, dataset=2 << 40)


def test_a_plan_fills_every_row() -> None:
    needs = make_plan(JOB).needs()
    assert [one.name for one in fields(Need) if getattr(needs, one.name) is None] == []


def test_what_a_plan_writes_is_what_doctor_reads(tmp_path: Path) -> None:
    made = make_plan(JOB)
    (tmp_path / "plan.json").write_text(json.dumps(made.as_plain()))
    assert read_need(tmp_path / "plan.json") == made.needs()


@pytest.mark.parametrize("gpus", [1, 8])
def test_shared_memory_is_a_gib_a_gpu_for_all_of_them(gpus: int) -> None:
    needs = make_plan(
        Job(parameters=1e9, batch=4, sample=8192, tokens=4096, nodes=1, gpus_per_node=gpus, dataset=1 << 40)
    ).needs()
    assert needs.shm_bytes == SHM_A_GPU * gpus


def test_a_job_of_one_node_registers_no_memory() -> None:
    assert (
        make_plan(Job(parameters=1e9, batch=4, sample=8192, tokens=4096, nodes=1, dataset=1 << 40))
        .needs()
        .memlock_bytes
        == 0
    )
