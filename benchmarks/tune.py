"""Question: does `stoker tune` claim what a rerun with its diff gives, and nothing where there is nothing?

Method: the eight jobs of tests/tune/jobs, each tuned as a user would (`stoker tune --minutes M`). Where a
setting is claimed it is applied (the diff; what a diff cannot hold through `stoker watch --apply`), and the
job as it was and as it is now are run in turn (A B B A …) under `stoker watch`, without any of tune's hooks,
for a window of steps each; the ratio of the medians is the real gain. `claimed / real` of 0.9 to 1.1 passes.

    python benchmarks/tune.py [--only plain healthy] [--minutes 3] [--rounds 3] [--seconds 4] [--no-keep]

A job takes its minutes and half a minute more: name some of them with --only for a short run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]

from kept_runs import RESULTS, keep  # noqa: E402
from stoker.tune.trial import Span, step_ends, window_seconds  # noqa: E402
from stoker.watch.command import Options, watch  # noqa: E402
from stoker.watch.runs import read_recording  # noqa: E402
from stoker.watch.window import Window  # noqa: E402

JOBS = ROOT / "tests" / "tune" / "jobs"
NOTHING = ("own_loop", "launch", "healthy")  # that tune must leave alone
SETTLE = 20


def tuned(job: Path, minutes: float) -> dict:
    words = ["tune", "--json", "--no-history", "--write", "--minutes", str(minutes)]
    command = [sys.executable, "-m", "stoker.cli", *words, "--out", str(job.parent / "trials")]
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [*command, "--", sys.executable, job.name],
        cwd=job.parent,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )
    return json.loads(done.stdout)


def step_s(job: Path, folder: Path, seconds: float, settings: Path | None = None) -> float:
    """Seconds a step of one window, the first steps left out."""
    options = Options(folder=folder, output=folder.with_suffix(".log"), gpu="none", apply=settings)
    window = Window(folder, seconds=seconds)
    window.grace_s = 10.0
    watch([sys.executable, str(job)], options, window=window)
    recording = read_recording(folder)
    shutil.rmtree(folder, ignore_errors=True)
    last = len(step_ends(recording))
    span = Span(settle=min(SETTLE, last // 3), last=last)
    return window_seconds(recording, span) / span.steps


def real_gain(before: Path, after: Path, rounds: int, seconds: float, settings: Path | None) -> float:
    runs: dict[Path, list[float]] = {before: [], after: []}
    for number in range(rounds):
        order = (before, after) if number % 2 == 0 else (after, before)
        for job in order:
            folder = job.parent / f"window-{job.stem}-{number}"
            runs[job].append(step_s(job, folder, seconds, settings if job is after else None))
    return statistics.median(runs[before]) / statistics.median(runs[after])


def measure(name: str, args: argparse.Namespace) -> dict:
    with tempfile.TemporaryDirectory() as place:
        job, before = Path(place, f"{name}.py"), Path(place, f"{name}_before.py")
        for copy in (job, before):
            shutil.copy(JOBS / f"{name}.py", copy)
        load = os.getloadavg()[0]
        found = tuned(job, args.minutes)
        claimed = found["gain"]["times"] if found["better"] else 1.0
        real = 1.0
        if found["better"]:
            # Without a site every loader is meant: the file's lines are others now, and the values the same.
            settings = Path(place, "settings.json")
            settings.write_text(
                json.dumps({"knobs": {k: v for k, v in found["knobs"].items() if "thread" in k}})
            )
            real = real_gain(before, job, args.rounds, args.seconds, settings)
        return {
            "job": name,
            "claimed": round(claimed, 3),
            "low": found["gain"]["low"] if found["better"] else None,
            "high": found["gain"]["high"] if found["better"] else None,
            "real": round(real, 3),
            "claimed_over_real": round(claimed / real, 3),
            "knobs": found["knobs"],
            "losses": found["losses"],
            "trials": len(found["trials"]),
            "seconds": round(found["seconds"], 1),
            "failed": [one["note"] for one in found["tried"] if one["note"]],
            "load_before": round(load, 1),  # of others, on these cores
            "passed": abs(claimed / real - 1) <= 0.1 and found["better"] is (name not in NOTHING),
        }


def main() -> None:
    names = sorted(path.stem for path in JOBS.glob("*.py"))
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--minutes", type=float, default=3.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--no-keep", action="store_true")
    args = parser.parse_args()
    jobs = []
    for name in args.only:
        jobs.append(measure(name, args))
        print(json.dumps(jobs[-1]), flush=True)
        if not args.no_keep:
            keep(RESULTS / "tune.json", {"minutes": args.minutes, "cores": os.cpu_count(), "jobs": jobs})


if __name__ == "__main__":
    main()
