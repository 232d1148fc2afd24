"""Rank and world size from torchrun's, Slurm's and Kubernetes' variables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.world import World


def test_without_a_launcher_the_world_is_one_process() -> None:
    assert World.from_environ({}) == World(rank=0, size=1, launcher="single")


def test_torchrun_says_it_all() -> None:
    environ = {
        "RANK": "11",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
    }
    assert World.from_environ(environ) == World(
        rank=11, size=16, local_rank=3, local_size=8, node=1, nodes=2, launcher="torchrun"
    )


def test_a_hand_made_torch_environment_fills_in_the_rest() -> None:
    found = World.from_environ({"RANK": "11", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"})
    assert (found.local_rank, found.node, found.nodes) == (3, 1, 2)


def test_slurm_reads_the_tasks_of_its_own_node() -> None:
    environ = {
        "SLURM_PROCID": "9",
        "SLURM_NTASKS": "11",
        "SLURM_NNODES": "3",
        "SLURM_NODEID": "2",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
    }
    assert World.from_environ(environ) == World(
        rank=9, size=11, local_rank=1, local_size=3, node=2, nodes=3, launcher="slurm"
    )


def test_torchrun_inside_srun_wins() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}
    assert World.from_environ(environ).launcher == "torchrun"


def test_a_run_is_told_from_others_by_what_its_launcher_sets() -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none"}
    assert World.from_environ(torchrun).run == "TORCHELASTIC_RUN_ID=none MASTER_PORT=29500"
    slurm = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    assert World.from_environ(slurm).run == "SLURM_JOB_ID=77 SLURM_STEP_ID=0"
    assert World.from_environ(torchrun | slurm).run == (
        "TORCHELASTIC_RUN_ID=none MASTER_PORT=29500 SLURM_JOB_ID=77 SLURM_STEP_ID=0"
    )
    assert World.from_environ({}).run == ""


def test_a_kubernetes_pod_is_a_node() -> None:
    found = World.from_environ({"JOB_COMPLETION_INDEX": "2", "STOKER_NODES": "4"})
    assert (found.rank, found.size, found.node, found.nodes) == (2, 4, 2, 4)


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(UsageError, match="rank 4 of 4 is impossible"):
        World.from_environ({"RANK": "4", "WORLD_SIZE": "4"})


def test_a_variable_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="WORLD_SIZE='many' is not a number"):
        World.from_environ({"RANK": "0", "WORLD_SIZE": "many"})


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_slurm_ranks_cover_every_node_exactly(tasks: list[int]) -> None:
    environ = {
        "SLURM_NTASKS": str(sum(tasks)),
        "SLURM_NNODES": str(len(tasks)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }
    rank = 0
    for node, count in enumerate(tasks):
        for local in range(count):
            place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
            assert World.from_environ({**environ, **place}).local_size == count
            rank += 1
