"""Many writers on one store: who waits for whom; and how often to save."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stoker.checkpoint.interval import Interval, advise, mtbf_of
from stoker.checkpoint.options import CheckpointOptions
from stoker.checkpoint.saved.writer import Pace
from stoker.checkpoint.storm import Limits, reads_after, start_delay_s, waits_for
from stoker.errors import UsageError
from stoker.world import World


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


def test_readers_and_writers_have_tokens_of_their_own() -> None:
    limits = Limits(job_writers=1, job_readers=2)
    assert [waits_for(world, limits) for world in worlds(1, 4)] == [[], [0], [1], [2]]
    assert [reads_after(world, limits) for world in worlds(1, 4)] == [[], [], [0], [1]]


@pytest.mark.parametrize("sizes", [[500_000], [100_000] * 5, [1] * 100])
def test_a_cap_holds_for_a_few_large_pieces_too(sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda wait: now.__setitem__(0, now[0] + wait))
    pace = Pace(1000.0)
    for size in sizes:
        pace.take(size)
    assert now[0] == pytest.approx(sum(sizes) / 1000)


def test_nodes_begin_evenly_over_the_stagger() -> None:
    delays = [start_delay_s(world, Limits(stagger_s=8.0)) for world in worlds(4, 2)]
    assert delays == [0, 0, 2, 2, 4, 4, 6, 6]


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


def test_a_job_that_never_fails_never_saves_and_nothing_overflows() -> None:
    interval = Interval("auto")
    for step in range(12):
        interval.note(step)
    assert interval.advised_steps(advise(stall_s=1, write_s=1, mtbf_s=math.inf)) > 10**12
    assert interval.is_due(10, steps=lambda: interval.advised_steps(None))


@pytest.mark.parametrize("mtbf_s", [-1.0, math.nan])
def test_no_time_between_failures_is_refused_at_once(mtbf_s: float) -> None:
    with pytest.raises(UsageError, match="no time between failures"):
        CheckpointOptions("run", mtbf_s=mtbf_s, world=World())


def test_what_a_save_costs_is_all_that_the_loop_loses_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With overlap the stall is short, and the steps beside the writing are longer."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    interval = Interval("auto")
    for step in range(30):
        interval.note(step, saving=10 < step <= 13)
        if step == 10:
            interval.saved()
        now[0] += 1.5 if 10 <= step < 13 else 1.0
    assert (interval.step_s, interval.lost_s) == (1.0, 1.5)
    both = advise(stall_s=0.1, lost_s=1.6, write_s=2.0, mtbf_s=86400)
    assert both.interval_s == pytest.approx(
        4 * advise(stall_s=0.1, write_s=2.0, mtbf_s=86400).interval_s, rel=0.02
    )


def test_more_gpus_fail_more_often() -> None:
    assert mtbf_of(16384) == pytest.approx(54 * 86400 / 419)
    assert mtbf_of(8) > mtbf_of(16)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(UsageError, match="job_writers=-1"):
        Limits(job_writers=-1)
