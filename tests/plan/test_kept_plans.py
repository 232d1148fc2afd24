"""Plans and courses come out as they were (`kept_plans.py` writes them anew, and draws what goes in)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kept_plans import CLUSTERS, JOBS, KEPT, cluster, planned, played

from kept_values import alike, kept, plain
from stoker.checkpoint.interval import advise
from stoker.plan.fluid import Job
from stoker.plan.job import make_job
from stoker.plan.saving import plan_saving
from stoker.plan.scene import Policy
from stoker.plan.sharing import fair_level, store_total

PLANS, COURSES = kept(KEPT / "plans.json"), kept(KEPT / "courses.json")


@pytest.mark.parametrize("seed", range(JOBS))
def test_a_job_is_planned_as_it_was(seed: int) -> None:
    found, was = plain(planned(seed)), PLANS[str(seed)]
    assert found.keys() == was.keys()
    for part, one in was.items():
        assert alike(one, found[part]), f"{part}: {found[part]}\nwas {one}"


@pytest.mark.parametrize("seed", range(CLUSTERS))
def test_a_course_goes_as_it_went(seed: int) -> None:
    found, was = plain(played(seed)), COURSES[str(seed)]
    assert found.keys() == was.keys()
    for part, one in was.items():
        assert alike(one, found[part]), f"{part}: {found[part]}\nwas {one}"


RATES = st.floats(1e6, 1e12)


@given(
    nodes=st.integers(1, 300),
    gpus=st.integers(1, 16),
    size=st.integers(10**6, 10**15),
    snapshot=RATES,
    nvme_rate=RATES,
    store=RATES,
    node=st.just(0.0) | RATES,
    nvme=st.sampled_from([0, 10**12]),
    mtbf=st.floats(1e4, 1e8),
    restart=st.floats(1, 1000),
)
def test_saving_is_counted_by_its_definitions(
    nodes: int,
    gpus: int,
    size: int,
    snapshot: float,
    nvme_rate: float,
    store: float,
    node: float,
    nvme: int,
    mtbf: float,
    restart: float,
) -> None:
    job = make_job(
        {
            "nodes": nodes,
            "gpus_per_node": gpus,
            "checkpoint": size,
            "snapshot_rate": snapshot,
            "nvme": nvme,
            "nvme_rate": nvme_rate,
            "store_rate": store,
            "node_rate": node,
            "mtbf": mtbf,
            "restart": restart,
        }
    )
    saving = plan_saving(job)
    copy, local = size / (nodes * gpus) / snapshot, size / nodes / nvme_rate if nvme else 0.0
    drain = size / min(store, node * nodes or store)
    durable = max(local, drain)
    assert saving.stall_s == pytest.approx(copy)
    assert saving.node_bytes * nodes == pytest.approx(size)
    assert (saving.write_s, saving.drain_s) == pytest.approx((local, drain))
    assert saving.sync_stall_s == pytest.approx(copy + durable)
    best = advise(stall_s=copy, write_s=durable, mtbf_s=mtbf).interval_s
    assert saving.interval_s == pytest.approx(max(60.0, 10 * drain, best))
    stopping = advise(stall_s=copy + durable, write_s=0.0, mtbf_s=mtbf, restart_s=restart)
    assert (saving.sync_interval_s, saving.sync_loss) == pytest.approx((stopping.interval_s, stopping.loss))
    lost = copy / saving.interval_s + (saving.interval_s / 2 + durable + restart) / mtbf
    assert saving.loss == pytest.approx(min(1.0, lost))
    assert saving.mtbf_s == mtbf


@given(wishes=st.lists(st.floats(0, 1e6), min_size=1, max_size=8), data=st.data(), total=st.floats(1, 1e7))
def test_a_fair_level_gives_all_there_is_and_nobody_more_than_they_want(
    wishes: list[float], data: st.DataObject, total: float
) -> None:
    counts = np.array(
        data.draw(st.lists(st.integers(1, 50), min_size=len(wishes), max_size=len(wishes))), float
    )
    wanted = np.array(wishes)
    level = fair_level(wanted, counts, total)
    given_ = float(np.minimum(wanted, level) @ counts)
    assert given_ == pytest.approx(min(total, float(wanted @ counts)))
    assert level == math.inf or (wanted > level * (1 - 1e-9)).any()


@given(seed=st.integers(0, 10**6), streams=st.floats(0, 1e4))
def test_a_store_gives_all_up_to_its_knee_and_less_beyond(seed: int, streams: float) -> None:
    some, _ = cluster(seed)
    beyond = max(0.0, streams / some.knee - 1) if some.knee else 0.0
    assert store_total(some, streams) * (1 + some.slope * beyond) == pytest.approx(some.store_rate)


@given(seed=st.integers(0, 10**6), stagger=st.floats(1, 100))
def test_classes_of_nodes_hold_every_node_once_and_the_slow_ones_among_them(
    seed: int, stagger: float
) -> None:
    some, _ = cluster(seed)
    for policy in (Policy(name="at once"), Policy(name="spread", stagger_s=stagger)):
        job = Job(some, policy)
        rate = some.node_rate or some.store_rate
        assert job.count.sum() == some.nodes
        assert (job.count > 0).all()
        if some.slow_link < 1:
            slow = job.count[job.link < rate * 0.999].sum()
            assert slow == round(some.slow_links * some.nodes)
        assert job.starts.min() >= 0
        assert job.starts @ job.count / some.nodes == pytest.approx(
            (some.nodes - 1) / 2 / some.nodes * policy.stagger_s
        )
