"""Does the simulation behind `stoker plan` say what really happens?

Question: seconds to the first step, seconds in all and the share of time in which processes do not compute,
simulated and measured, for jobs of 1 to 8 nodes before one store, with and without staging, with one slow
network, with checkpoints that stop the loop or go on behind it, and with a node that is lost.
Method: rclone serves a dataset with --bwlimit, one bucket of bytes for everybody; a node is a process that
reads from it (plainly, or through stoker's cache), waits for the others and computes (sleeps). The same
numbers go into the simulation. Times are those the server's limit enforces, so a busy machine changes
little; every scene runs several times and its median counts.
Command: python benchmarks/plan_model.py [--rounds 3]; --rounds 0 only draws what is simulated.
Writes benchmarks/results/plan_model.json, and the plots of docs/concepts/simulation.md; among them a
simulation of 10,000 nodes, with the seconds it took.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np

from kept_runs import keep

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "integration")]
from throttled_store import Scene, Seen, play, throttled_store  # noqa: E402

from stoker.plan import simulate  # noqa: E402
from stoker.plan.arithmetic import make_plan  # noqa: E402
from stoker.plan.job import make_job  # noqa: E402
from stoker.plan.page import idle_by_nodes, idle_over_time, plot  # noqa: E402
from stoker.plan.scene import Cluster, Course, Policy, cluster_of  # noqa: E402
from stoker.stage.through.scheduler import BEHIND  # noqa: E402

LARGE = {
    "nodes": 10_000, "read_rate": "20MB/s", "dataset": "2000TB", "store_rate": "1000GB/s", "nvme": "3.5TB",
    "node_rate": "12.5GB/s", "parameters": "1T",
}  # fmt: skip
RATE, SLOW_RATE = 40_000_000, 1_000_000
FILES, FILE_BYTES = 16, 9 << 20  # beyond stoker's 8 MiB, so that each travels by itself
INDEX_BYTES = 64 << 10  # a small file beside each shard, which staging everything brings too
STEP = {"step_s": 0.1, "step_bytes": 3 << 19}  # 15.7 MB/s a node: the store is enough for two and a half
SAVES = {"checkpoint": 8 << 20, "interval_s": 2.0}
LOST = {"loss_s": 5.0, "restart_s": 1.0}
SCENES = {
    "store, 1 node": Scene(nodes=1, staging="none", epochs=1, **STEP),
    "store, 2 nodes": Scene(nodes=2, staging="none", **STEP),
    "store, 4 nodes": Scene(nodes=4, staging="none", **STEP),
    "store, 8 nodes": Scene(nodes=8, staging="none", **STEP),
    "store, 4 nodes, one slow": Scene(nodes=4, staging="none", epochs=1, slow_nodes=1, files=4, **STEP),
    "everything, 2 nodes": Scene(nodes=2, staging="everything", **STEP),
    "shares, 2 nodes": Scene(nodes=2, staging="share", **STEP),
    "shares, 4 nodes": Scene(nodes=4, staging="share", **STEP),
    "shares, 8 nodes": Scene(nodes=8, staging="share", **STEP),
    "saves that stop the loop": Scene(nodes=2, staging="none", saving="stop", **SAVES, **STEP),
    "saves behind the loop": Scene(nodes=2, staging="none", **SAVES, **STEP),
    "saves behind staged shares": Scene(nodes=4, staging="share", **SAVES, **STEP),
    "a lost node, from the store": Scene(nodes=2, staging="none", **SAVES, **LOST, **STEP),
    "a lost node, shares": Scene(nodes=2, staging="share", saving="stop", **SAVES, **LOST, **STEP),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "plan_model.json")
    parser.add_argument("--plots", type=Path, default=HERE.parent / "docs" / "concepts")
    options = parser.parse_args()
    large = ten_thousand(options.plots)
    if options.rounds:
        measure(options, large)


def measure(options: argparse.Namespace, large: dict) -> None:
    with tempfile.TemporaryDirectory(prefix="stoker-model-") as scratch, open_store(Path(scratch)) as store:
        seen: dict[str, list[Seen]] = {name: [] for name in SCENES}
        for number in range(options.rounds):
            for name, scene in SCENES.items():
                seen[name].append(play(store, scene, Path(scratch) / f"nodes{number}"))
                print(name, seen[name][-1], predict(scene).seconds, flush=True)
    rows = {name: compare(predict(SCENES[name]), runs) for name, runs in seen.items()}
    report = {"store_bytes_s": RATE, "rounds": options.rounds, "scenes": rows, "ten_thousand_nodes": large}
    keep(options.results, report)
    (options.plots / "simulation-measured.svg").write_text(measured_plot(rows))
    print(json.dumps({name: row["seconds_error"] for name, row in rows.items()}, indent=1))


def measured_plot(rows: dict) -> str:
    """Idle shares, measured and simulated, by the number of nodes."""
    lines = {}
    for kind, label in (("store", "read from the store"), ("shares", "stage shares")):
        counts = [n for n in (1, 2, 4, 8) if f"{kind}, {n} nodes" in rows or (kind, n) == ("store", 1)]
        found = [rows[f"{kind}, {n} node{'s' if n > 1 else ''}"] for n in counts]
        for how in ("measured", "simulated"):
            lines[f"{label}, {how}"] = (np.log2(counts), np.array([row[f"{how}_idle"] for row in found]))
    ticks = [(float(np.log2(n)), f"{n}") for n in (1, 2, 4, 8)]
    return plot(lines, right=3.0, ticks=ticks, across="nodes", title="Idle share, measured and simulated")


def ten_thousand(plots: Path) -> dict:
    """A job of internet scale under each policy, and on fewer nodes; and how long that took to simulate."""
    began = time.monotonic()
    plan = make_plan(make_job(LARGE))
    cluster = cluster_of(plan, epochs=4.0, slow_links=0.001, slow_link=0.5)
    policies = simulate.usual_policies(cluster)
    courses = [simulate.play(cluster, policy) for policy in policies]
    played = time.monotonic() - began
    sweeps = [simulate.sweep(cluster, policy, (1, 10, 100, 1000, 10_000)) for policy in policies]
    swept = time.monotonic() - began - played
    (plots / "simulation-time.svg").write_text(idle_over_time(courses, until=5 * 3600))
    (plots / "simulation-nodes.svg").write_text(idle_by_nodes(sweeps))
    facts = {course.policy.name: {**course.as_plain(points=2)} for course in courses}
    return {"job": LARGE, "seconds": played, "sweep_seconds": swept, "courses": facts}


def open_store(folder: Path):
    rclone, nginx = (found(name) for name in ("rclone", "nginx"))
    return throttled_store(
        folder, rate=RATE, slow_rate=SLOW_RATE, files=FILES, file_bytes=FILE_BYTES, rclone=rclone, nginx=nginx
    )


def found(name: str) -> str:
    path = shutil.which(name, path=f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/bin")
    if not path:
        raise SystemExit(f"{name} is not installed: see tests/install-debian.sh and the bench extra")
    return path


def predict(scene: Scene) -> Course:
    """The same scene in the model."""
    dataset = float((scene.files or FILES) * FILE_BYTES)
    beside = FILES * INDEX_BYTES if scene.staging == "everything" else 0
    cluster = Cluster(
        nodes=scene.nodes,
        demand=scene.step_bytes / scene.step_s,
        dataset=dataset + beside,
        store_rate=float(RATE),
        epochs=float(scene.epochs),
        cache=0.0 if scene.staging == "none" else dataset + beside,
        first=float(BEHIND * FILE_BYTES),  # so many files come side by side behind the first batch
        ahead=float(scene.ahead),
        knee=0,
        slow_links=scene.slow_nodes / scene.nodes,
        slow_link=SLOW_RATE / RATE,
        checkpoint=float(scene.checkpoint),
        interval_s=scene.interval_s,
        mtbf_s=scene.loss_s,
        restart_s=scene.restart_s,
    )
    policy = Policy(name=scene.staging, staging=scene.staging, saving=scene.saving)
    return simulate.play(cluster, policy)


def compare(course: Course, runs: list[Seen]) -> dict:
    seconds = statistics.median(run.seconds for run in runs)
    return {
        "measured_s": seconds,
        "measured_idle": statistics.median(run.idle_share for run in runs),
        "simulated_s": course.seconds,
        "simulated_idle": course.idle_share,
        "seconds_error": course.seconds / seconds - 1,
        "runs": [asdict(run) for run in runs],
    }


if __name__ == "__main__":
    main()
