"""Does the simulation behind `stoker plan` say what really happens?

Question: seconds to the first step, seconds in all and the share of time in which processes wait for data,
simulated and measured, for jobs of 1 to 8 nodes before one store, with and without staging, and with one slow
network.
Method: rclone serves a dataset with --bwlimit, one bucket of bytes for everybody; a node is a process that
reads from it (plainly, or through stoker's cache), waits for the others and computes (sleeps). The same
numbers go into the simulation. Times are those the server's limit enforces, so a busy machine changes
little; every scene runs three times and its median counts.
Command: python benchmarks/plan_model.py [--rounds 3]
Writes benchmarks/results/plan_model.json and docs/concepts/simulation.svg.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent / "tests" / "integration")]
from throttled_store import Scene, Seen, play, throttled_store  # noqa: E402

from stoker.plan import simulate  # noqa: E402
from stoker.plan.scene import Cluster, Course, Policy  # noqa: E402
from stoker.stage.prefetch import AT_ONCE  # noqa: E402

RATE, SLOW_RATE = 40_000_000, 1_000_000
FILES, FILE_BYTES = 16, 9 << 20  # beyond stoker's 8 MiB, so that each travels by itself
INDEX_BYTES = 64 << 10  # a small file beside each shard, which staging everything brings too
STEP = {"step_s": 0.1, "step_bytes": 3 << 19}  # 15.7 MB/s a node: the store is enough for two and a half
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
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--results", type=Path, default=HERE / "results" / "plan_model.json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stoker-model-") as scratch, open_store(Path(scratch)) as store:
        seen: dict[str, list[Seen]] = {name: [] for name in SCENES}
        for number in range(options.rounds):
            for name, scene in SCENES.items():
                seen[name].append(play(store, scene, Path(scratch) / f"nodes{number}"))
                print(name, seen[name][-1], predict(scene).seconds, flush=True)
    rows = {name: compare(predict(SCENES[name]), runs) for name, runs in seen.items()}
    report = {"store_bytes_s": RATE, "rounds": options.rounds, "scenes": rows}
    options.results.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: row["seconds_error"] for name, row in rows.items()}, indent=1))


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
        first=float(AT_ONCE * FILE_BYTES),
        ahead=float(scene.ahead),
        knee=0,
        slow_links=scene.slow_nodes / scene.nodes,
        slow_link=SLOW_RATE / RATE,
    )
    return simulate.play(cluster, Policy(name=scene.staging, staging=scene.staging))


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
