"""Many writers on one store, and how often to save."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.interval import advise, mtbf_of
from stoker.checkpoint.storm import Fleet, Limits, simulate, start_delay_s, waits_for
from stoker.errors import UsageError
from stoker.world import World

FLEET = Fleet(
    writers=1024, bytes_each=2e9, store_bytes_per_s=100e9, writer_bytes_per_s=5e9, knee=64, slope=0.1,
    readers=1024, read_bytes_per_s=20e9,
)  # fmt: skip


def worlds(nodes: int, each: int) -> list[World]:
    return [
        World(rank=n * each + i, size=nodes * each, local_rank=i, local_size=each, node=n, nodes=nodes)
        for n in range(nodes)
        for i in range(each)
    ]


@given(st.integers(1, 9), st.integers(1, 8), st.integers(0, 4), st.integers(0, 20))
def test_tokens_bound_who_writes_at_a_time(nodes: int, each: int, per_node: int, per_job: int) -> None:
    limits, all_ranks = Limits(node_writers=per_node, job_writers=per_job), worlds(nodes, each)
    waiting = {world.rank: set(waits_for(world, limits)) for world in all_ranks}
    done: set[int] = set()
    while waiting:  # everybody begins as soon as it may, and all that have begun end together
        begun = {rank for rank, needs in waiting.items() if needs <= done}
        assert begun, "nobody may begin"
        assert not per_job or len(begun) <= per_job
        for node in range(nodes):
            on_node = [rank for rank in begun if rank // each == node]
            assert not per_node or len(on_node) <= per_node
        done |= begun
        waiting = {rank: needs for rank, needs in waiting.items() if rank not in begun}


def test_nodes_begin_evenly_over_the_stagger() -> None:
    delays = [start_delay_s(world, Limits(stagger_s=8.0)) for world in worlds(4, 2)]
    assert delays == [0, 0, 2, 2, 4, 4, 6, 6]


def test_one_writer_takes_its_bytes_by_its_rate() -> None:
    alone = simulate(replace(FLEET, writers=1, readers=0, read_bytes_per_s=0), Limits())
    assert alone.seconds == pytest.approx(2e9 / 5e9)
    assert alone.least_read_share == 1


@given(st.integers(1, 400), st.integers(0, 100), st.floats(0, 60), st.floats(1e6, 1e10))
def test_no_byte_goes_faster_than_the_store(writers: int, tokens: int, stagger: float, cap: float) -> None:
    fleet = replace(FLEET, writers=writers)
    storm = simulate(fleet, Limits(job_writers=tokens, stagger_s=stagger, write_bytes_per_s=cap))
    assert storm.seconds * fleet.store_bytes_per_s >= writers * fleet.bytes_each * 0.999
    assert storm.most_writers <= min(writers, tokens or writers)
    assert 0 <= storm.least_read_share <= 1


def test_tokens_and_caps_leave_the_readers_more() -> None:
    free = simulate(FLEET, Limits())
    tokens = simulate(FLEET, Limits(job_writers=64))
    capped = simulate(FLEET, Limits(write_bytes_per_s=5e6))
    assert tokens.seconds < free.seconds  # fewer at a time: the store is not driven past its knee
    assert tokens.mean_writer_s < free.mean_writer_s / 4
    assert tokens.least_read_share > free.least_read_share
    assert capped.least_read_share > free.least_read_share


def test_the_interval_is_youngs_for_short_saves() -> None:
    advice = advise(stall_s=2.0, write_s=10.0, mtbf_s=86400.0)
    assert advice.interval_s == pytest.approx((2 * 2.0 * 86400) ** 0.5, rel=0.02)
    assert 0 < advice.loss < 0.02


@given(st.floats(1e-3, 100), st.floats(0, 1000), st.floats(1e4, 1e7))
def test_advice_is_never_shorter_than_a_write_and_no_neighbour_is_better(
    stall: float, write: float, mtbf: float
) -> None:
    advice = advise(stall_s=stall, write_s=write, mtbf_s=mtbf)
    assert advice.interval_s >= write

    def loss(interval: float) -> float:
        return stall / interval + (interval / 2) / mtbf

    best = loss(advice.interval_s)
    assert all(best <= loss(max(write, advice.interval_s * factor)) * 1.1 for factor in (0.5, 2.0))


def test_more_gpus_fail_more_often() -> None:
    assert mtbf_of(16384) == pytest.approx(54 * 86400 / 419)
    assert mtbf_of(8) > mtbf_of(16)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="job_writers=-1"):
        Limits(job_writers=-1)
