"""Several ranks: another number of them, kills at any moment, nodes of their own, a rank that is lost."""

from __future__ import annotations

import json
import re
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

    def run(script: str, *arguments: object, timeout_s: float = 240) -> str:
        done = subprocess.run(
            [sys.executable, str(HERE / script), *map(str, arguments)],
            env=stoker_environ(OMP_NUM_THREADS="1", TORCH_CPP_LOG_LEVEL="FATAL"),
            capture_output=True,
            text=True,
            timeout=timeout_s,
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


@pytest.mark.parametrize(("ranks", "kills"), [(1, 30), (2, 20), (4, 10)])
def test_the_last_good_checkpoint_survives_kills_at_any_moment(
    ranks: int, kills: int, run_job: Any, tmp_path: Path
) -> None:
    report = json.loads(run_job("kill_job.py", tmp_path / "run", ranks, kills, ranks))
    assert (report["ok"], report["failed"], report["left"], report["faults"]) == (kills, 0, [], [])
    assert report["durable"] >= report["patient"] > 0


@pytest.mark.parametrize(
    ("ranks", "kills"),
    [
        (2, 8),
        (4, 6),
        pytest.param(2, 150, marks=pytest.mark.slow),
        pytest.param(4, 150, marks=pytest.mark.slow),
    ],
)
def test_kills_of_random_ranks_lose_and_mix_nothing_in_either_tier_and_leave_nothing(
    ranks: int, kills: int, run_job: Any, tmp_path: Path
) -> None:
    arguments = (tmp_path / "run", ranks, kills, 10 * ranks, tmp_path / "far")
    report = json.loads(run_job("kill_job.py", *arguments, timeout_s=1800))
    assert (report["ok"], report["failed"], report["left"], report["faults"]) == (kills, 0, [], [])
    assert report["kept"] == [min(2, there + 1) for there in report["there"]]
    assert report["drained"] == report["durable"] > 0


# --- scenes ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(run_job: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    names = ["two_nodes", "a_rank_dies", "the_run_after", "a_rank_fails", "the_first_rank_fails"]
    names += ["a_restore_fails", "a_rank_leaves", "skips", "turns", "a_rank_fails_and_goes"]
    names += ["a_drain_fails", "a_plan_fails", "the_first_plan_fails", "slow_turns", "a_rank_dies_in_between"]
    names += ["a_second_one"]
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
    assert re.search(r"rank 1 brought no part: rank 1 \(process \d+ on .*\) has died", report["said"])
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


def test_ranks_hear_alike_of_one_that_died_between_saves(scenes: dict[str, Any]) -> None:
    said = {report["said"] for report in scenes["a_rank_dies_in_between"]}
    assert len(said) == 1
    assert re.fullmatch(r"rank 1 \(process \d+ on .*\) has died", said.pop())


def test_a_second_checkpointer_at_the_same_address_is_refused_alike_on_all_ranks(
    scenes: dict[str, Any],
) -> None:
    cure = "close the Checkpointer that was made before this one, or give each a port of its own in board="
    assert scenes["a_second_one"] == [{"said": cure, "saves": 2, "left": []}] * 2


def test_writing_draining_and_reading_go_by_turns_and_waiting_is_no_death(scenes: dict[str, Any]) -> None:
    order = [f"part-{rank:05d}.bin" for rank in range(4)]
    report = {"saves": 1, "drained": 1, "order": order, "read at once": []}
    assert scenes["slow_turns"] == [report] * 4


def test_a_drain_that_fails_is_said_alike_on_all_ranks_and_mends_itself(scenes: dict[str, Any]) -> None:
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
