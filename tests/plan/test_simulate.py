"""The simulation: what must hold for any cluster, and what it says of known ones."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stoker.checkpoint.interval import advise
from stoker.errors import UsageError
from stoker.plan import fluid
from stoker.plan.arithmetic import make_plan
from stoker.plan.caching import misses
from stoker.plan.job import make_job
from stoker.plan.page import idle_by_nodes, plan_page
from stoker.plan.scene import CAUSES, Cluster, Course, Policy, cluster_of
from stoker.plan.simulate import play, sweep, usual_policies
from stoker.plan.strides import Strides
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


SAVING = replace(SAVED := replace(ROOMY, epochs=1.0, checkpoint=2.5e11, interval_s=300.0), stall_s=1.0)


@pytest.mark.parametrize("nodes", [1, 4, 8, 100])
def test_saves_that_stop_the_loop_cost_their_time(nodes: int) -> None:
    """A share takes 1,000 s: saves after 300, 600 and 900 s of work, each as long as the store takes."""
    saving = replace(SAVED, nodes=nodes, dataset=1e12 * nodes, store_rate=2.5e9 * nodes)
    course = play(saving, Policy(name="stop", staging="none", saving="stop"))
    assert course.seconds == pytest.approx(1000 + 3 * 100)
    assert course.shares()["checkpoint"] == pytest.approx(300 / 1300)


def test_saves_behind_the_loop_cost_their_snapshot() -> None:
    course = play(replace(SAVING, node_rate=1e10), NONE)
    assert course.seconds == pytest.approx(1000 + 3)
    assert course.shares()["checkpoint"] == pytest.approx(3 / 1003)


def test_saves_behind_the_loop_take_their_part_of_the_store_from_the_reads() -> None:
    """A store that gives just what four nodes read: what the saves take, the reads lack."""
    course = play(replace(SAVING, store_rate=4e9, checkpoint=1e10, stall_s=0.0, ahead=0.0), NONE)
    assert course.seconds == pytest.approx(1000 + 3 * 4 * 1e10 / 4e9)
    assert course.shares()["data"] == pytest.approx(30 / 1030)


def test_a_save_that_outlasts_its_interval_is_followed_by_the_next_and_the_job_still_ends() -> None:
    slow = replace(SAVING, checkpoint=1e13, node_rate=1.2e10)  # 4,000 s each
    assert play(slow, replace(NONE, saving="stop")).whole
    behind = play(replace(slow, ahead=0.0), NONE)
    assert behind.whole
    assert behind.idle_share < 0.01


def test_what_the_plan_says_of_saving_is_what_happens() -> None:
    """The arithmetic of a whole job, beside the same job played through."""
    values = {"nodes": 8, "read_rate": "2MB/s", "dataset": "400TB", "store_rate": "40GB/s", "nvme": "90TB"}
    plan = make_plan(make_job({**values, "parameters": "70B", "node_rate": "12GB/s", "mtbf": "30h"}))
    cluster = replace(cluster_of(plan), mtbf_s=plan.saving.mtbf_s, restart_s=plan.job.restart)
    behind = play(cluster, replace(SHARE, saving="behind"))
    stopping = play(cluster, replace(SHARE, saving="stop"))
    lost = [
        sum(course.shares()[cause] for cause in ("checkpoint", "failure")) for course in (behind, stopping)
    ]
    assert lost[0] == pytest.approx(plan.saving.loss, rel=0.15)
    assert lost[1] == pytest.approx(plan.saving.sync_loss, rel=0.15)


LOSING = replace(ROOMY, nodes=1, demand=1e9, dataset=1e15, epochs=1.0, node_rate=1e10, nvme_rate=0.0)


def test_a_lost_node_costs_what_was_done_since_the_last_save_and_the_restart() -> None:
    losing = replace(LOSING, dataset=1e12, checkpoint=1.0, interval_s=400.0, mtbf_s=700.0, restart_s=50.0)
    course = play(losing, replace(NONE, staging="everything", saving="behind"))
    course = play(replace(losing, cache=0.0), NONE)
    # lost at 700: back to 400, and after 50 s the 300 again; the next loss, at 1,400, comes too late
    assert course.seconds == pytest.approx(1000 + 50 + 300)
    assert course.shares()["failure"] == pytest.approx(350 / 1350)


@pytest.mark.long
def test_young_and_dalys_interval_loses_least() -> None:
    """Saves of 60 s, a loss every 20,000 s: the best interval is some 1,500 s."""
    losing = replace(LOSING, checkpoint=6e11, mtbf_s=19_937.0, restart_s=10.0, cache=0.0)
    best = advise(stall_s=60.0, write_s=0.0, mtbf_s=losing.mtbf_s, restart_s=10.0)

    def lost(interval: float) -> float:
        some = [
            play(replace(losing, interval_s=interval * near), replace(NONE, saving="stop")) for near in NEAR
        ]
        return sum(course.idle_share for course in some) / len(some)

    around = {factor: lost(best.interval_s * factor) for factor in (0.25, 0.5, 1.0, 2.0, 4.0)}
    assert min(around, key=lambda factor: around[factor]) == 1.0
    assert around[1.0] == pytest.approx(best.loss, rel=0.1)


NEAR = (
    0.91,
    0.97,
    1.0,
    1.03,
    1.09,
)  # losses come at even distances: intervals that beat with them average out


def test_strides_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike intervals in one stride, and each of them played: the same course."""
    long = replace(TIGHT, demand=1e7, dataset=1e12, checkpoint=1e9, interval_s=600.0, stall_s=0.5)
    long = replace(long, mtbf_s=50_000.0, restart_s=60.0)
    for policy in (*usual_policies(long), replace(SHARE, stagger_s=10.0, save_stagger_s=60.0)):
        quick = play(long, policy)
        with monkeypatch.context() as patched:
            patched.setattr(Strides, "save_begun", lambda self, job: None)
            plain = play(long, policy)
        assert len(quick.t) < len(plain.t)
        assert quick.seconds == pytest.approx(plain.seconds, rel=1e-6)
        assert quick.store_bytes == pytest.approx(plain.store_bytes, rel=1e-6)
        assert quick.shares() == pytest.approx(plain.shares(), rel=1e-5, abs=1e-7)
        assert quick.saturated == pytest.approx(plain.saturated, rel=1e-5, abs=1e-7)


def test_cohorts_of_a_spread_change_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand nodes that start one after another, in 32 steps and in 128."""
    many = replace(TIGHT, nodes=1000, dataset=1e15, store_rate=6e11, checkpoint=1e11, interval_s=300.0)
    policy = replace(SHARE, stagger_s=60.0, save_stagger_s=100.0)
    coarse = play(many, policy)
    monkeypatch.setattr(fluid, "COHORTS", 128)
    fine = play(many, policy)
    assert coarse.seconds == pytest.approx(fine.seconds, rel=0.005)
    assert coarse.idle_share == pytest.approx(fine.idle_share, abs=0.005)


def test_a_capped_node_leaves_the_store_to_others() -> None:
    capped = play(ROOMY, replace(SHARE, cap=1.2e9))
    assert capped.store.max() <= 4 * 1.2e9 / 1e10 + 1e-6
    assert capped.idle_share < 0.05


def test_staggered_starts_are_waited_for_by_all() -> None:
    assert play(ROOMY, replace(NONE, stagger_s=300)).first_step_s == pytest.approx(225)


def test_too_many_streams_cost_the_store_its_rate() -> None:
    crowd = replace(TIGHT, cache=0, knee=2, slope=0.1)
    assert play(crowd, NONE).seconds > 1.08 * play(replace(crowd, knee=0), NONE).seconds


def test_the_sweep_shows_where_the_store_saturates() -> None:
    idle = {c.cluster.nodes: c.idle_share for c in sweep(replace(ROOMY, cache=0), NONE, [5, 10, 20, 100])}
    assert idle[5] < 0.01
    assert idle[10] < 0.02
    assert idle[20] == pytest.approx(0.5, abs=0.02)
    assert idle[100] == pytest.approx(0.9, abs=0.02)


@pytest.mark.long
@settings(max_examples=60)
@given(
    nodes=st.integers(1, 50),
    demand=st.floats(1e6, 1e10),
    share=st.floats(1e9, 1e12),
    store=st.floats(1e7, 1e12),
    cache=st.just(0.0) | st.floats(1.0, 1e13),  # bytes
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
    mtbf=st.sampled_from([0.0, 30.0]),
)
def test_any_course_is_one_that_could_happen(
    nodes: int, demand: float, share: float, store: float, cache: float, node_rate: float, policy: Policy,
    checkpoint: float, mtbf: float,
) -> None:  # fmt: skip
    cluster = Cluster(
        nodes=nodes, demand=demand, dataset=share * nodes, store_rate=store, cache=cache, node_rate=node_rate,
        checkpoint=checkpoint, interval_s=share / demand / 3, mtbf_s=mtbf * share / demand,
    )  # fmt: skip
    course = play(cluster, policy)
    assert (course.idle >= -1e-9).all()
    assert (course.idle.sum(axis=0) <= 1 + 1e-6).all()
    assert (course.store <= 1 + 1e-9).all()
    assert (np.diff(course.t) > 0).all()
    assert course.whole or mtbf
    if course.whole:
        assert course.seconds >= 2 * share / demand * (1 - 1e-6)
        # no more came from the store than it can give
        assert course.store_bytes <= store * course.seconds * (1 + 1e-6)
        if (
            not policy.peers and not mtbf
        ):  # bytes are conserved: what is used came once, from the store or the cache
            copied = min(cache, cluster.dataset) if policy.staging == "everything" else 0.0
            assert course.store_bytes == pytest.approx(nodes * (copied + misses(cluster, policy)), rel=1e-6)
        productive = course.seconds * (1 - course.idle_share)
        assert productive == pytest.approx(2 * share / demand, rel=1e-6)


def test_ten_thousand_nodes_are_played_in_as_few_events_as_ten() -> None:
    small, large = (
        play(
            replace(ROOMY, nodes=n, dataset=1e12 * n, store_rate=1e9 * n, slow_links=0.1, slow_link=0.9),
            SHARE,
        )
        for n in (10, 10_000)
    )
    assert large.whole
    assert len(large.t) == len(small.t)
    assert large.idle_share == pytest.approx(small.idle_share)


def test_a_simulation_says_what_it_needs_to_know() -> None:
    with pytest.raises(UsageError, match="needs demand") as refused:
        cluster_of(make_plan(make_job({"nodes": 4})))
    assert "read_rate" in refused.value.hint


def test_the_page_and_the_text_show_every_policy() -> None:
    values = {"nodes": 9, "read_rate": "200MB/s", "dataset": "20TB", "store_rate": "10GB/s", "nvme": "4TB"}
    plan = make_plan(make_job({**values, "name": "<b>&"}))
    cluster = cluster_of(plan)
    courses = [play(cluster, policy) for policy in usual_policies(cluster)]
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


def test_a_job_that_is_lost_more_often_than_it_saves_says_that_it_does_not_end() -> None:
    hopeless = replace(LOSING, checkpoint=1.0, interval_s=500.0, mtbf_s=400.0, restart_s=10.0)
    plan = make_plan(make_job({"read_rate": "1GB/s"}))
    assert "not at its end after" in say_plan(plan, [play(hopeless, NONE)])


def _played(**job: object) -> list[Course]:
    cluster = cluster_of(make_plan(make_job(job)))
    return [play(cluster, policy) for policy in usual_policies(cluster)]


@pytest.mark.parametrize("nodes", [1, 2, 1_000_000])
@pytest.mark.parametrize("nvme", ["0", "100MB", "1TB"])
def test_a_job_begins_with_no_more_than_its_nodes_can_hold(nodes: int, nvme: str) -> None:
    given = {"read_rate": "200MB/s", "dataset": "20TB", "store_rate": "10GB/s", "checkpoint": "1TB"}
    assert all(course.whole for course in _played(nodes=nodes, nvme=nvme, **given))


@pytest.mark.parametrize("staging", ["none", "everything", "share"])
def test_less_than_an_epoch_is_begun_with_less(staging: str) -> None:
    course = play(replace(ROOMY, epochs=0.0005), Policy(name="short", staging=staging))
    assert course.whole
    assert course.seconds >= 0.0005 * ROOMY.share / ROOMY.demand


def test_nothing_is_read_past_the_end_in_a_stride() -> None:
    job = {"nodes": 2, "gpus_per_node": 1, "read_rate": 20_201, "dataset": "106GB", "store_rate": "626MB/s"}
    read = _played(checkpoint="1MB", **job)[0]
    assert read.store_bytes == pytest.approx(2 * 106e9, rel=1e-6)


def test_bytes_that_are_few_beside_an_epoch_are_still_used() -> None:
    job = {"nodes": 2, "read_rate": 1237, "dataset": "3PB", "store_rate": "630GB/s", "checkpoint": 3}
    assert all(course.whole for course in _played(**job))
