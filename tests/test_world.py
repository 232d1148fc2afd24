"""Rank and world size from torch.distributed and from the variables of launchers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.world import World, unnamed_siblings


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
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "11",
        "SLURM_NNODES": "3",
        "SLURM_NODEID": "2",
        "SLURM_LOCALID": "1",
        "SLURM_TASKS_PER_NODE": "4(x2),3",
    }
    assert World.from_environ(environ) == World(
        rank=9, size=11, local_rank=1, local_size=3, node=2, nodes=3, launcher="slurm", run="SLURM_STEP_ID=0"
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
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": str(len(tasks)),
        "SLURM_TASKS_PER_NODE": ",".join(map(str, tasks)),
    }
    rank = 0
    for node, count in enumerate(tasks):
        for local in range(count):
            place = {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
            assert World.from_environ({**environ, **place}).local_size == count
            rank += 1


def test_deepspeed_calls_the_size_of_a_node_otherwise() -> None:
    environ = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4", "CROSS_RANK": "1"}
    found = World.from_environ({**environ, "CROSS_SIZE": "2"})
    assert (found.rank, found.local_rank, found.local_size, found.node, found.nodes) == (5, 1, 4, 1, 2)


def test_ranks_that_are_not_told_of_nodes_agree_that_there_is_one() -> None:
    ranks = [{"RANK": str(r), "WORLD_SIZE": "4", "LOCAL_RANK": str(r % 2)} for r in range(4)]
    assert {World.from_environ(one).nodes for one in ranks} == {1}


@st.composite
def launchers(draw: st.DrawFn) -> dict[str, str]:
    """What a launcher that counts nodes sets in one of its ranks."""
    nodes, each = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    rank = draw(st.integers(0, nodes * each - 1))
    size, local, node = str(nodes * each), str(rank % each), str(rank // each)
    mpi = {"RANK": str(rank), "SIZE": size, "LOCAL_RANK": local, "LOCAL_SIZE": str(each)}
    slurm = {"PROCID": str(rank), "NTASKS": size, "LOCALID": local, "NODEID": node, "NNODES": str(nodes)}
    intel = {"PMI_RANK": str(rank), "PMI_SIZE": size, "MPI_LOCALRANKID": local, "MPI_LOCALNRANKS": str(each)}
    return draw(
        st.sampled_from(
            [
                {f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()},
                {"SLURM_STEP_ID": "0", **{f"SLURM_{name}": value for name, value in slurm.items()}},
                intel,
            ]
        )
    )


@given(launchers(), st.booleans())
def test_a_rank_that_a_script_copied_from_its_launcher_has_that_launchers_nodes(
    environ: dict[str, str], meets: bool
) -> None:
    """As `export RANK=$SLURM_PROCID` does, and DeepSpeed's init_distributed with what MPI tells it."""
    told = World.from_environ(environ)
    copied = {"RANK": told.rank, "WORLD_SIZE": told.size, "LOCAL_RANK": told.local_rank}
    meeting = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"} if meets else {}
    found = World.from_environ({**environ, **{name: str(one) for name, one in copied.items()}, **meeting})
    assert found == told
    assert found.knows_nodes
    assert found.may_span_nodes == (told.nodes > 1)


def test_what_a_launcher_of_other_ranks_says_of_nodes_is_not_taken() -> None:
    outer = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    inner = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
    assert replace(World.from_environ(outer | inner), run="") == World.from_environ(inner)
    odd = {"SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "many"}
    assert replace(World.from_environ(odd | inner), run="") == World.from_environ(inner)


@pytest.mark.parametrize(
    ("more", "knows", "may_span"),
    [
        ({}, False, False),
        ({"MASTER_ADDR": "localhost"}, True, False),
        ({"MASTER_ADDR": "node0"}, False, True),
        ({"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "4"}, True, False),
        ({"MASTER_ADDR": "node0", "LOCAL_WORLD_SIZE": "2"}, True, True),
    ],
)
def test_of_ranks_that_were_set_by_hand_nobody_knows_the_nodes(
    more: dict[str, str], knows: bool, may_span: bool
) -> None:
    found = World.from_environ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **more})
    assert (found.knows_nodes, found.may_span_nodes) == (knows, may_span)


def test_open_mpi_says_it_all() -> None:
    names = {"RANK": 5, "SIZE": 6, "LOCAL_RANK": 1, "LOCAL_SIZE": 2}
    environ = {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in names.items()}
    found = World.from_environ({**environ, "OMPI_MCA_orte_num_nodes": "3"})
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 6, 1, 2)
    assert (found.node, found.nodes, found.launcher) == (2, 3, "mpirun")


def test_mpirun_inside_a_step_of_slurm_wins() -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}
    assert World.from_environ({**step, "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}).rank == 1
    assert World.from_environ({**step, "PMI_RANK": "1", "PMI_SIZE": "2"}).rank == 1


def test_what_slurm_sets_for_mpi_is_still_slurm() -> None:
    step = {"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4", "PMI_RANK": "3", "PMI_SIZE": "4"}
    assert World.from_environ(step).launcher == "slurm"


def test_plain_python_in_an_sbatch_script_is_one_process() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7"}
    assert World.from_environ(batch).size == 1


@pytest.mark.parametrize("step", ["4294967290", "4294967291", "batch", "interactive"])
def test_the_steps_of_a_batch_script_and_of_salloc_s_shell_are_none(step: str) -> None:
    environ = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": step}
    assert World.from_environ(environ) == World()


@pytest.mark.parametrize("name", ["PMIX_RANK", "MV2_COMM_WORLD_RANK"])
def test_a_rank_without_a_size_says_that_there_are_others(name: str) -> None:
    assert unnamed_siblings({name: "1"}) == f"{name}=1"
    assert unnamed_siblings({name: "0"}) == ""


def test_a_step_on_a_part_of_its_job_counts_its_own_tasks() -> None:
    job = {"SLURM_NTASKS": "8", "SLURM_NNODES": "4", "SLURM_TASKS_PER_NODE": "2(x4)"}
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": "2"}
    found = World.from_environ(
        {**job, **step, "SLURM_STEP_ID": "1", "SLURM_PROCID": "1", "SLURM_LOCALID": "1"}
    )
    assert (found.size, found.nodes, found.local_size) == (2, 1, 2)


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("SLURM_TASKS_PER_NODE", "4(x", r"SLURM_TASKS_PER_NODE='4\(x'"),
        ("SLURM_NNODES", "0", "node 0 of 0"),
        ("SLURM_NTASKS", "-1", "rank 0 of -1"),
        ("SLURM_LOCALID", "here", "SLURM_LOCALID='here'"),
    ],
)
def test_impossible_variables_of_slurm_are_named(variable: str, value: str, said: str) -> None:
    step = {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}
    with pytest.raises(UsageError, match=said):
        World.from_environ({**step, variable: value})


def test_a_pod_that_is_not_told_how_many_there_are_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing says of how many") as raised:
        World.from_environ({"JOB_COMPLETION_INDEX": "2"})
    assert "STOKER_NODES" in raised.value.hint


class Group:
    """torch.distributed, as far as it is asked."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return self._size > 0

    def get_rank(self) -> int:
        return self._rank

    def get_world_size(self) -> int:
        return self._size


def here(environ: dict[str, str], rank: int, size: int) -> World:
    return World.here(environ, {"torch.distributed": Group(rank, size)})


def test_torch_distributed_is_believed_where_no_launcher_speaks() -> None:
    found = here({}, 1, 2)
    assert (found.rank, found.size, found.local_rank, found.nodes) == (1, 2, 1, 1)
    assert not found.knows_nodes
    assert here({"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1, 2).knows_nodes


def test_torch_distributed_that_is_not_initialised_says_nothing() -> None:
    assert here({"RANK": "1", "WORLD_SIZE": "2"}, 0, 0).rank == 1
    assert World.here({}, {}) == World()


def test_torch_distributed_and_a_launcher_that_agree_are_one() -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert here(environ, 3, 4) == World.from_environ(environ)


def test_ranks_that_the_processes_of_a_launcher_started_are_its_own() -> None:
    step = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_NNODES": "2"}
    found = here({**step, "SLURM_NODEID": "1"}, 6, 8)
    assert (found.local_rank, found.local_size, found.node, found.nodes) == (2, 4, 1, 2)


@pytest.mark.parametrize(("rank", "size"), [(0, 2), (0, 1), (0, 3), (3, 8)])
def test_two_sources_that_contradict_each_other_are_both_shown(rank: int, size: int) -> None:
    with pytest.raises(UsageError, match=f"rank {rank} of {size}.*torchrun say rank 1 of 2"):
        here({"RANK": "1", "WORLD_SIZE": "2"}, rank, size)


@given(st.integers(1, 9), st.integers(1, 9))
def test_torch_s_ranks_are_taken_once_each_whoever_started_them(outer: int, each: int) -> None:
    ranks = [
        here({"RANK": str(r // each), "WORLD_SIZE": str(outer)}, r, outer * each) for r in range(outer * each)
    ]
    assert [one.rank for one in ranks] == list(range(outer * each))


def test_the_parts_of_a_rank_are_ranks_of_their_own() -> None:
    parts = [World(rank=r, size=3).split(part, 2).rank for r in range(3) for part in range(2)]
    assert parts == list(range(6))
