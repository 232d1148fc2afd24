"""The simulation: what must hold for any cluster, and what it says of known ones."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.errors import UsageError
from stoker.plan.arithmetic import make_plan
from stoker.plan.job import make_job
from stoker.plan.page import idle_by_nodes, plan_page
from stoker.plan.scene import CAUSES, Cluster, Policy, cluster_of
from stoker.plan.simulate import play, saturates_at, sweep, usual_policies
from stoker.plan.text import say_plan

ROOMY = Cluster(
    nodes=4,
    demand=1e9,
    dataset=4e12,
    store_rate=1e10,
    cache=2e12,
    nvme_rate=3e9,
    ahead=1e9,
    first=1e9,
    knee=0,
)
TIGHT = replace(ROOMY, store_rate=2e9)
NONE, SHARE = Policy(name="none", staging="none"), Policy(name="share", staging="share")
EVERYTHING = Policy(name="everything", staging="everything")


def test_a_store_that_is_fast_enough_keeps_everyone_busy() -> None:
    course = play(ROOMY, NONE)
    assert course.whole
    assert course.idle_share < 0.01
    assert course.seconds == pytest.approx(2000, rel=0.01)


def test_a_store_half_as_fast_as_needed_makes_gpus_wait_half_the_time() -> None:
    course = play(replace(TIGHT, cache=0), NONE)
    assert course.idle_share == pytest.approx(0.5, abs=0.01)
    assert course.saturated > 0.95
    assert course.store_bytes == pytest.approx(2 * 4e12, rel=0.02)


def test_staged_shares_are_read_from_the_store_once() -> None:
    course = play(TIGHT, SHARE)
    assert course.store_bytes == pytest.approx(4e12, rel=0.01)
    # the first epoch takes twice as long, the second does not wait
    assert course.seconds == pytest.approx(2000 + 1000, rel=0.02)


def test_copying_everything_costs_a_dataset_a_node_before_step_one() -> None:
    course = play(replace(TIGHT, cache=4e12), EVERYTHING)
    assert course.first_step_s == pytest.approx(4 * 4e12 / 2e9, rel=0.01)
    assert course.shares()["data"] == pytest.approx(0, abs=0.01)


def test_peers_bring_everything_in_the_time_of_one_copy() -> None:
    course = play(replace(TIGHT, cache=4e12, node_rate=12e9), replace(EVERYTHING, peers=True))
    assert course.first_step_s == pytest.approx(4e12 / 2e9, rel=0.01)
    assert course.store_bytes == pytest.approx(4e12, rel=0.02)


def test_one_slow_network_slows_the_whole_job() -> None:
    slow = replace(ROOMY, node_rate=2e9, slow_links=0.25, slow_link=0.25, cache=0)
    assert play(slow, NONE).idle_share == pytest.approx(0.5, abs=0.02)


def test_one_slow_gpu_is_told_apart_from_late_data() -> None:
    shares = play(replace(ROOMY, slow_gpus=0.25, slow_gpu=0.8), NONE).shares()
    assert shares["straggler"] == pytest.approx(0.2, abs=0.01)
    assert shares["data"] < 0.01


def test_saves_that_stop_the_loop_cost_their_time_and_those_behind_it_their_snapshot() -> None:
    saving = replace(
        ROOMY, checkpoint=2.5e11, interval_s=500.0, stall_s=1.0
    )  # 100 s each, at the store's rate
    stopped, behind = (play(saving, replace(SHARE, saving=how)) for how in ("stop", "behind"))
    assert stopped.shares()["checkpoint"] == pytest.approx(100 / 500, abs=0.05)
    assert behind.shares()["checkpoint"] < 0.01


def test_a_capped_node_leaves_the_store_to_others() -> None:
    capped = play(ROOMY, replace(SHARE, cap=1.2e9))
    assert capped.store.max() <= 4 * 1.2e9 / 1e10 + 1e-6
    assert capped.idle_share < 0.05


def test_staggered_starts_are_waited_for_by_all() -> None:
    assert play(ROOMY, replace(NONE, stagger_s=300)).first_step_s == pytest.approx(225, abs=10)


def test_too_many_streams_cost_the_store_its_rate() -> None:
    crowd = replace(TIGHT, cache=0, knee=2, slope=0.1)
    assert play(crowd, NONE).seconds > 1.08 * play(replace(crowd, knee=0), NONE).seconds


def test_the_sweep_shows_where_the_store_saturates() -> None:
    assert saturates_at(ROOMY) == 10
    idle = {c.cluster.nodes: c.idle_share for c in sweep(replace(ROOMY, cache=0), NONE, [5, 10, 20, 100])}
    assert idle[5] < 0.01
    assert idle[10] < 0.02
    assert idle[20] == pytest.approx(0.5, abs=0.02)
    assert idle[100] == pytest.approx(0.9, abs=0.02)


@settings(max_examples=15)
@given(
    nodes=st.integers(1, 50),
    demand=st.floats(1e6, 1e10),
    share=st.floats(1e9, 1e12),
    store=st.floats(1e7, 1e12),
    cache=st.floats(0, 1e13),
    node_rate=st.floats(1e7, 1e11),
    policy=st.builds(
        Policy,
        name=st.just("any"),
        staging=st.sampled_from(["none", "everything", "share"]),
        peers=st.booleans(),
        stagger_s=st.floats(0, 100),
        saving=st.sampled_from(["stop", "behind"]),
    ),
    checkpoint=st.sampled_from([0.0, 1e9]),
)
def test_any_course_is_one_that_could_happen(
    nodes: int, demand: float, share: float, store: float, cache: float, node_rate: float, policy: Policy,
    checkpoint: float,
) -> None:  # fmt: skip
    cluster = Cluster(
        nodes=nodes, demand=demand, dataset=share * nodes, store_rate=store, cache=cache, node_rate=node_rate,
        checkpoint=checkpoint, interval_s=share / demand,
    )  # fmt: skip
    course = play(cluster, policy, ticks=100)
    assert (course.idle >= -1e-9).all()
    assert (course.idle.sum(axis=0) <= 1 + 1e-6).all()
    assert (course.store <= 1 + 1e-9).all()
    assert (np.diff(course.t) > 0).all()
    if course.whole:
        assert course.seconds >= 2 * share / demand * (1 - 1e-6)
        # no more came from the store than it can give
        assert course.store_bytes <= store * course.seconds * (1 + 1e-6)


def test_ten_thousand_nodes_are_played_with_as_few_ticks_as_ten() -> None:
    small, large = (
        play(
            replace(ROOMY, nodes=n, dataset=1e12 * n, store_rate=1e9 * n, slow_links=0.1, slow_link=0.9),
            SHARE,
        )
        for n in (10, 10_000)
    )
    assert large.whole
    assert len(large.t) == len(small.t)
    assert large.idle_share == pytest.approx(small.idle_share, abs=0.01)


def test_a_simulation_says_what_it_needs_to_know() -> None:
    with pytest.raises(UsageError, match="needs demand") as refused:
        cluster_of(make_plan(make_job({"nodes": 4})))
    assert "read_rate" in refused.value.hint


def test_the_page_and_the_text_show_every_policy() -> None:
    values = {"nodes": 9, "read_rate": "200MB/s", "dataset": "20TB", "store_rate": "10GB/s", "nvme": "4TB"}
    plan = make_plan(make_job({**values, "name": "<b>&"}))
    cluster = cluster_of(plan)
    courses = [play(cluster, policy, ticks=100) for policy in usual_policies(cluster)]
    page, text = plan_page(plan, courses), say_plan(plan, courses)
    for course in courses:
        assert course.policy.name in page
        assert course.policy.name in text
    assert "<b>&" not in page
    assert "src=" not in page
    assert "14.4 GB/s the job" in text
    svg = ElementTree.fromstring(idle_by_nodes([sweep(cluster, courses[0].policy, [1, 10])]))
    assert svg.get("role") == "img"
    assert set(courses[0].shares()) == set(CAUSES)


def test_a_course_that_never_gets_going_says_so() -> None:
    hopeless = replace(ROOMY, nodes=100, store_rate=1.0)
    plan = make_plan(make_job({"read_rate": "1GB/s"}))
    said = say_plan(plan, [play(hopeless, EVERYTHING, ticks=600)])
    assert "no first step in" in said
    unfinished = replace(play(ROOMY, NONE), whole=False)
    assert "not at its end after" in say_plan(plan, [unfinished])


def test_more_nodes_than_memory_has_room_for_are_refused() -> None:
    with pytest.raises(UsageError, match="more than can be played through"):
        replace(ROOMY, nodes=10**12)
