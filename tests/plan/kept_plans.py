"""Plans of drawn jobs and courses of drawn clusters, number by number and word by word: kept, and compared.

    PYTHONPATH=tests python tests/plan/kept_plans.py

writes `kept/` anew, after a sum or a text was changed on purpose: its difference is what to look at then.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from kept_values import keep
from stoker.errors import UsageError
from stoker.plan.arithmetic import make_plan
from stoker.plan.job import make_job
from stoker.plan.scene import Cluster, Course, Policy, cluster_of
from stoker.plan.simulate import play, usual_policies
from stoker.plan.text import say_plan

KEPT = Path(__file__).parent / "kept"
JOBS, CLUSTERS = 40, 60
_MAY: dict[str, tuple[object, ...]] = {
    "nodes": (1, 2, 16, 300),
    "gpus_per_node": (1, 4, 8),
    "step": ("500ms", "2s", 0),
    "batch": (1, 32, 256),
    "sample": ("3MB", "100kB", 8192),
    "decoded": (0, "600kB"),
    "read_rate": ("200MB/s", "2GB/s", "31MB/s", "200MB/s", 0),
    "parameters": (0, "8B", "70B"),
    "tokens": (0, 8192),
    "dataset": ("2TB", "20TB", "400TB", "20TB", "20TB", 0),
    "epochs": (0.5, 1, 3),
    "store_rate": ("3GB/s", "10GB/s", "80GB/s", "1TB/s", 0),
    "store_latency": ("1ms", "200ms"),
    "node_rate": (0, "12GB/s"),
    "target_rate": (0, "1GB/s"),
    "nvme": (0, "500GB", "30TB"),
    "nvme_rate": ("2.5GB/s", 0, "1GB/s"),
    "memory": (0, 0, 0, "2000GiB"),
    "cores": (0, 16, 192),
    "loader": ("thread", "process"),
    "workers": (2, 8),
    "prefetch": (1, 4),
    "shm": (0, 0, "9GiB"),
    "checkpoint": (0, "500GB"),
    "mtbf": (0, "30h"),
    "gpu_hour": (0, 2.5),
}


def planned(seed: int) -> dict[str, Any]:
    """What a drawn job comes to, or why it is refused."""
    draw = random.Random(seed)
    values = {name: draw.choice(some) for name, some in _MAY.items() if draw.random() < 0.9}
    try:
        plan = make_plan(make_job({"name": f"job {seed}", **values}))
        found: dict[str, Any] = {**plan.as_plain(), "said": say_plan(plan).splitlines()}
        del found["job"]
        cluster = cluster_of(plan, mtbf_s=plan.saving.mtbf_s, restart_s=300.0)
    except UsageError as error:
        return {**locals().get("found", {}), "refused": error.message, "hint": error.hint}
    return {**found, "cluster": cluster, "policies": usual_policies(cluster)}


def cluster(seed: int) -> tuple[Cluster, Policy]:
    """Some nodes and a way to go about it, such that an epoch takes about 1,000 s of work."""
    draw = random.Random(-1 - seed)
    nodes = draw.choice([1, 3, 8, 50])
    share, demand = 1e12 * draw.uniform(0.5, 2), 1e9 * draw.uniform(0.5, 2)
    some = Cluster(
        nodes=nodes,
        demand=demand,
        dataset=share * nodes,
        store_rate=demand * nodes * draw.choice([0.4, 0.8, 1.1, 3.0]),
        epochs=draw.choice([0.4, 1.0, 2.5, 3.0]),
        node_rate=demand * draw.choice([0.0, 0.9, 2.0, 8.0]),
        cache=share * draw.choice([0.0, 0.3, 1.0, 2.0]),
        nvme_rate=demand * draw.choice([0.0, 0.7, 3.0]),
        ahead=share * draw.choice([0.0, 0.001, 0.01]),
        first=share * draw.choice([0.001, 0.05]),
        knee=draw.choice([0, 2, 6]),
        slope=draw.choice([0.1, 0.5]),
        slow_links=draw.choice([0.0, 0.3]),
        slow_link=draw.choice([1.0, 0.5]),
        slow_gpus=draw.choice([0.0, 0.5]),
        slow_gpu=draw.choice([1.0, 0.9]),
        checkpoint=share * draw.choice([0.0, 0.01, 0.1]),
        interval_s=draw.choice([100.0, 333.0]),
        stop_interval_s=draw.choice([0.0, 500.0]),
        stall_s=draw.choice([0.0, 2.0]),
        mtbf_s=draw.choice([0.0, 0.0, 1450.0]),
        restart_s=draw.choice([0.0, 60.0]),
    )
    policy = Policy(
        name="drawn",
        staging=draw.choice(["none", "everything", "share"]),
        peers=draw.random() < 0.4,
        stagger_s=draw.choice([0.0, 0.0, 40.0]),
        cap=some.demand * draw.choice([0.0, 0.0, 1.2]),
        saving=draw.choice(["stop", "behind"]),
        save_stagger_s=draw.choice([0.0, 0.0, 20.0]),
    )
    return some, policy


def played(seed: int) -> dict[str, Any]:
    course = play(*cluster(seed))
    whole = course.as_plain(points=12)
    return {**whole, "pieces": len(course.t), "said": _said(course)}


def _said(course: Course) -> list[str]:
    plan = make_plan(make_job({"nodes": course.cluster.nodes}))
    return say_plan(replace(plan, unknown=()), [course]).splitlines()[-1:]


def main() -> None:
    keep(KEPT / "plans.json", {str(seed): planned(seed) for seed in range(JOBS)})
    keep(KEPT / "courses.json", {str(seed): played(seed) for seed in range(CLUSTERS)})


if __name__ == "__main__":
    main()
