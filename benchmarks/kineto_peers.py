"""Do `stoker diagnose` and HolisticTraceAnalysis say the same of a profiler's trace, and which is quicker?

Method: each trace is read by both, in turns, three times, each in a process of its own that imports nothing
else first; the time is from the file to both breakdowns, imports left out. Traces: the files given (one job's
ranks joined by commas), and two synthetic ones that are always there. Percentages of the temporal breakdown
(idle, compute, non-compute) and of the overlap of communication and computation stand side by side. HTA
rounds traces in nanoseconds to whole microseconds, inwards: where kernels are short that alone is a
difference of up to a point.

    pip install HolisticTraceAnalysis
    python benchmarks/kineto_peers.py trace.json.gz rank0.json.gz,rank1.json.gz …     # seconds a trace
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from kept_runs import RESULTS, keep

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

OURS = """
import json, sys, time
from pathlib import Path
from stoker.diagnose.activity import worked
from stoker.watch.runs.profiled import read_traces
began = time.perf_counter()
rows = []
for rank in read_traces([Path(one) for one in sys.argv[1:]]).ranks:
    seen = worked(rank.looks[-1])
    share = lambda part: round(100 * part / seen.kernel_s, 2)
    both = [round(100 * one.overlap, 2) for one in seen.moved if one.kind == "collective"]
    rows.append([share(seen.idle_s), share(seen.compute_s), share(seen.other_s), *(both or [None])])
print(json.dumps({"s": time.perf_counter() - began, "rows": rows}))
"""
HTA = """
import json, logging, sys, time, warnings
warnings.filterwarnings("ignore"); logging.disable(logging.CRITICAL)
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
found = TraceAnalysis(trace_files=dict(enumerate(sys.argv[1:])), trace_dir="/")
parts = found.get_temporal_breakdown(visualize=False)
try:
    both = found.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"].tolist()
except Exception:
    both = [None] * len(parts)
names = ["idle_time_pctg", "compute_time_pctg", "non_compute_time_pctg"]
rows = [[*row, one if one == one else None] for row, one in zip(parts[names].values.tolist(), both)]
print(json.dumps({"s": time.perf_counter() - began, "rows": rows}))
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("traces", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS / "kineto_peers.json")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jobs = [one.split(",") for one in given.traces] + _made(Path(folder))
        rows = {Path(job[0]).name: _beside([str(Path(one).resolve()) for one in job]) for job in jobs}
    versions = {"HolisticTraceAnalysis": metadata.version("HolisticTraceAnalysis")}
    keep(given.out, {"traces": rows, "versions": versions})


def _made(folder: Path) -> list[list[str]]:
    from kineto_traces import training

    alone = training(steps=10, kernels=600, kernel_us=40).write(folder / "made-alone.json.gz")
    ranks = [
        training(rank=rank, world=2, steps=6, kernels=400, reduce_us=9000 + 2000 * rank).write(
            folder / f"made-rank{rank}.json.gz"
        )
        for rank in (0, 1)
    ]
    return [[str(alone)], [str(one) for one in ranks]]


def _beside(job: list[str]) -> dict:
    runs = [[_run(code, job) for code in (OURS, HTA)] for _ in range(3)]
    ours, theirs = runs[-1]
    rows = zip(ours["rows"], theirs["rows"], strict=True)
    pairs = [pair for mine, other in rows for pair in zip(mine, other, strict=True) if None not in pair]
    apart = max((abs(a - b) for a, b in pairs), default=0.0)
    row = {
        "ranks": len(job),
        "stoker": ours["rows"],
        "hta": theirs["rows"],
        "points_apart": round(apart, 2),
        "stoker_s": statistics.median(run[0]["s"] for run in runs),
        "hta_s": statistics.median(run[1]["s"] for run in runs),
    }
    print(Path(job[0]).name, json.dumps(row), flush=True)
    return row


def _run(code: str, job: list[str]) -> dict:
    done = subprocess.run([sys.executable, "-c", code, *job], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{job}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
