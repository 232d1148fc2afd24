"""Several ranks: another number of them, kills at any moment, nodes of their own, a rank that is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.integration

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def run_job(stoker_environ: Any) -> Callable[..., str]:
    """Run one of the scripts beside this file; gives what it said."""

    def run(script: str, *arguments: object) -> str:
        done = subprocess.run(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env=stoker_environ(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL"),
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        return done.stdout

    return run


# --- another number of ranks ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def resharded(run_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    reports = json.loads(run_job("reshard_job.py", tmp_path_factory.mktemp("reshard")))
    return {"{}-{}-{}".format(*report["case"]): report for report in reports}


@pytest.mark.parametrize("case", ["fsdp-2-1", "fsdp-2-4", "fsdp-4-2", "columns-2-4", "ddp-2-4", "ddp-4-1"])
def test_another_number_of_ranks_gets_the_same_state(case: str, resharded: dict[str, Any]) -> None:
    report = resharded[case]
    assert len(report["ranks"]) == report["case"][2]
    for rank in report["ranks"]:
        assert (rank["equal"], rank["step"], rank["extras"]) == (True, 4, {"note": "hello"})


def test_replicated_state_is_written_once(resharded: dict[str, Any]) -> None:
    assert resharded["ddp-2-4"]["ranks"][0]["bytes"] == resharded["ddp-4-1"]["ranks"][0]["bytes"]


# --- kill -9 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "kills"), [(1, 100), (2, 70), (4, 30)])
def test_the_last_good_checkpoint_survives_kills_at_any_moment(
    ranks: int, kills: int, run_job: Any, tmp_path: Path
) -> None:
    report = json.loads(run_job("kill_job.py", tmp_path / "run", ranks, kills, ranks))
    assert (report["ok"], report["failed"]) == (kills, 0)
    assert report["durable"] >= report["patient"] > 0


# --- scenes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(run_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ["two_nodes", "a_rank_dies", "the_run_after", "a_rank_fails", "the_first_rank_fails"]
    names += ["a_restore_fails", "a_rank_leaves", "skips", "turns", "a_rank_fails_and_goes"]
    names += ["a_drain_fails", "a_plan_fails", "the_first_plan_fails"]
    said = run_job("ranks_job.py", tmp_path_factory.mktemp("scenes"), *names)
    found = [json.loads(line[6:]) for line in said.splitlines() if line.startswith("SCENE ")]
    return {scene["scene"]: scene["ranks"] for scene in found}


def test_nodes_without_a_shared_folder_save_and_restore(scenes: dict[str, Any]) -> None:
    descriptions = ["checkpoint.json", "part-00000.json", "part-00001.json"]
    for rank, report in enumerate(scenes["two_nodes"]):
        assert report["files"] == sorted([*descriptions, f"part-{rank:05d}.bin"])
        assert (report["step"], report["equal"], report["kept"], report["remote"]) == (3, True, 2, 2)
        assert report["left"] == []


def test_a_rank_lost_during_a_save_is_named_and_the_old_one_is_safe(scenes: dict[str, Any]) -> None:
    (report,) = scenes["a_rank_dies"]
    assert "rank 1 brought no part" in report["said"]
    assert (report["step"], report["w"], len(report["left"])) == (1, 1.0, 1)


def test_what_a_lost_rank_left_goes_with_the_next_run(scenes: dict[str, Any]) -> None:
    assert scenes["the_run_after"] == [{"left": [], "kept": 2}]


def test_a_failure_on_one_rank_surfaces_on_all(scenes: dict[str, Any]) -> None:
    first, second = scenes["a_rank_fails"]
    assert "rank 1 brought no part: extra is a builtins.object" in first["said"][0]
    assert second["said"] == ["extra is a builtins.object, which a checkpoint cannot hold"]
    assert first["step"] == second["step"] == 3


def test_a_rank_that_failed_and_went_is_not_waited_for(scenes: dict[str, Any]) -> None:
    first, _ = scenes["a_rank_fails_and_goes"]
    assert "rank 1 brought no part: extra is a builtins.object" in first["said"]


def test_a_failure_on_the_first_rank_surfaces_on_all(scenes: dict[str, Any]) -> None:
    first, second = scenes["the_first_rank_fails"]
    assert first["said"] == ["extra is a builtins.object, which a checkpoint cannot hold"]
    assert "extra is a builtins.object" in second["said"][0]
    assert first["step"] == second["step"] == 3


def test_a_restore_that_fails_on_one_rank_fails_on_all(scenes: dict[str, Any]) -> None:
    assert all("model.weight is (4, 3) here" in report["said"] for report in scenes["a_restore_fails"])


def test_a_rank_can_leave_while_the_first_hangs(scenes: dict[str, Any]) -> None:
    assert scenes["a_rank_leaves"] == [{"left": True, "drained": 1}] * 2


def test_ranks_skip_alike(scenes: dict[str, Any]) -> None:
    assert scenes["skips"] == [{"begun": [True, False, False, True], "skipped": 2}] * 3


def test_writers_take_turns(scenes: dict[str, Any]) -> None:
    assert scenes["turns"][0]["order"] == [f"part-{rank:05d}.bin" for rank in range(4)]


def test_a_drain_that_fails_on_rank_0_delays_no_node(scenes: dict[str, Any]) -> None:
    said = "a checkpoint is saved here, and not in the remote tier: the manifest cannot be brought"
    assert scenes["a_drain_fails"] == [{"said": said, "drained": 1, "far": 1}] * 2


@pytest.mark.parametrize(("scene", "failing"), [("a_plan_fails", 1), ("the_first_plan_fails", 0)])
def test_state_that_one_rank_cannot_plan_is_an_error_on_all(
    scene: str, failing: int, scenes: dict[str, Any]
) -> None:
    cause = "extra is a torch.sparse_coo tensor, which a checkpoint cannot hold"
    for rank, report in enumerate(scenes[scene]):
        said = cause if rank == failing else f"the state of rank {failing} cannot be saved: {cause}"
        assert report == {"said": [said, said], "told": True, "step": 2}
