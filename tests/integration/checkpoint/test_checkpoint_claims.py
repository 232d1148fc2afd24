"""Ranks that do not hold what they say, or do not mean the same, are told apart or refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCENES = ["steps_differ", "objects_differ", "options_differ", "replicas_differ", "partial_sums"]
SCENES += ["generators_part", "buffers_part", "parameters_part", "stages", "fsdp1"]
SCENES += ["parted_stages", "fsdp1_by_torch", "trained_apart", "names_clash", "state_fails", "zero"]


@pytest.fixture(scope="module")
def scenes(stoker_environ: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(HERE / "claims_job.py"), str(tmp_path_factory.mktemp("claims")), *SCENES],
        env=stoker_environ(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "Traceback" not in done.stderr, done.stderr[-3000:]
    found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("SCENE ")]
    return {scene["scene"]: scene["ranks"] for scene in found}


def test_ranks_at_different_steps_are_refused_and_go_on(scenes: dict[str, Any]) -> None:
    said = "rank 0 is to save step 10, rank 1 step 9"
    assert scenes["steps_differ"] == [{"said": said, "step": 11}] * 2


def test_ranks_with_different_objects_are_refused(scenes: dict[str, Any]) -> None:
    said = [
        "rank 0 is to save ['state'], rank 1 ['more', 'state']",
        "rank 0 is to restore ['state'], rank 1 ['more', 'state']",
        "ranks 0 and 1 were told differently how to restore: strict=False and True",
    ]
    assert scenes["objects_differ"] == [{"said": said}] * 2


def test_ranks_with_different_options_are_refused(scenes: dict[str, Any]) -> None:
    said = "ranks 0 and 1 were told differently how to save: keep=0 and 1"
    assert scenes["options_differ"] == [{"said": said}] * 2


def test_replicas_that_differ_are_refused_before_a_byte_is_written(scenes: dict[str, Any]) -> None:
    said = "ranks 0 and 1 say that they hold state.w alike, and their values differ"
    assert scenes["replicas_differ"] == [{"said": said, "files": [], "values": [0.0]}] * 2


def test_partial_sums_are_refused_by_name(scenes: dict[str, Any]) -> None:
    for report in scenes["partial_sums"]:
        assert "state.w is a DTensor of partial sums" in report["said"]
        assert report["files"] == []


def test_generators_that_part_after_the_first_save_are_saved_apart(scenes: dict[str, Any]) -> None:
    apart = ["loader@0.generator", "loader@1.generator"]
    for rank, report in enumerate(scenes["generators_part"]):
        assert report["names"] == {"1": ["loader.generator"], "2": apart, "3": apart}
        assert (report["equal"], report["seen"]) == (True, 3 + 10 * rank)


def test_each_rank_gets_its_buffers_back_and_another_job_those_of_the_first(scenes: dict[str, Any]) -> None:
    assert scenes["buffers_part"] == [{"own": True, "differs": True, "alone": True}] * 2


def test_parameters_that_differ_by_rank_are_warned_of_once(scenes: dict[str, Any]) -> None:
    first, second = scenes["parameters_part"]
    (said,) = first["said"]
    assert said.startswith("2 tensors differ by rank, model.weight first")
    assert second["said"] == []


def test_replicas_that_part_after_the_first_save_are_saved_apart(scenes: dict[str, Any]) -> None:
    own = {"1": True, "2": True, "3": True}
    assert scenes["trained_apart"] == [{"own": own, "said": 1}, {"own": own, "said": 0}]


def test_stages_that_were_alike_at_the_first_save_and_parted_since_are_saved_apart(
    scenes: dict[str, Any],
) -> None:
    assert scenes["parted_stages"] == [{kind: [True] * 4 for kind in ("plain", "cut", "frozen")}] * 4


def test_a_name_of_a_tensor_here_and_of_something_else_there_is_refused(scenes: dict[str, Any]) -> None:
    for report in scenes["names_clash"]:
        assert all("state.x is a tensor on one rank, and something else" in said for said in report["said"])
        assert report["files"] == []


def test_a_state_dict_that_raises_on_one_rank_is_heard_of_on_all(scenes: dict[str, Any]) -> None:
    first, second = scenes["state_fails"]
    assert first == {"said": "the state of rank 1 cannot be saved: RuntimeError: not now", "step": 2}
    assert second == {"said": "its own: not now", "step": 2}


def test_an_optimizer_cut_over_ranks_is_refused_and_comes_back_as_advised(scenes: dict[str, Any]) -> None:
    for report in scenes["zero"]:
        assert "optimizer is a ZeroRedundancyOptimizer" in report["said"]
        assert report["files"] == []
        assert report["equal"] == [True] * 4


def test_stages_with_names_of_their_own_are_restored_strictly(scenes: dict[str, Any]) -> None:
    for report in scenes["stages"]:
        assert (report["equal"], report["report"][1:]) == (True, [0, 0])
        assert "has 8 tensors or values that have no place here" in report["gone"]
        assert report["left"] == 8


def test_fsdp1_is_refused_by_name_in_all_its_modes(scenes: dict[str, Any]) -> None:
    for report in scenes["fsdp1"]:
        assert len(report["said"]) == 18
        assert all("is wrapped in FullyShardedDataParallel (FSDP1)" in said for said in report["said"])
        assert report["files"] == []


def test_the_state_of_fsdp1_as_torch_gathers_it_comes_back(scenes: dict[str, Any]) -> None:
    assert scenes["fsdp1_by_torch"] == [{"equal": True}] * 2
