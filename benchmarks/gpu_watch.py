"""Does `stoker watch` name what is wrong on a real GPU, what does watching cost, and is the price right?

Method, on one GPU in one run:
  1. verdicts: each fault of the labelled recordings is re-enacted live by `gpu_scenarios.py`, which knows
     nothing of stoker, under `stoker watch`; then `stoker diagnose --json` must give its label first
  2. cost: the healthy job alternately alone and watched; medians of its step times. The spread of the
     turns alone is the null control: no difference smaller than that means anything
  3. price: `stoker watch --what-if data` on a starved job measures the ceiling with cached batches; the
     diagnosis of an ordinary run had to foretell it

    python benchmarks/gpu_watch.py
    python benchmarks/gpu_watch.py --only fed,starved_steady --seconds 10 --turns 0
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kept_runs import keep

HERE = Path(__file__).parent
EXPECTED = {
    "fed": "healthy",
    "starved_steady": "data_starvation",
    "starved_burst": "data_starvation",
    "starved_cpu": "data_starvation",
    "h2d_pageable": "h2d_copy",
    "h2d_pinned": "h2d_copy",
    "fp32_no_tf32": "precision",
    "tiny_kernels": "launch_bound",
    "checkpoint_sync": "checkpoint_stall",
    "hang_spin": "collective_hang",
    "memory_pressure": "memory_pressure",
}
CAUSES = {"starved_cpu": "cpu"}


def job(fault: str, seconds: float, folder: Path, steps: Path | None = None) -> list[str]:
    more = ["--steps", str(steps)] if steps else []
    script = str(HERE / "gpu_scenarios.py")
    return [sys.executable, script, fault, "--seconds", str(seconds), "--folder", str(folder), *more]


def watched(run: Path, command: list[str], *options: str) -> int:
    stoker = [sys.executable, "-m", "stoker.cli", "watch", "--hz", "10", "--out", str(run), *options, "--"]
    done = subprocess.run([*stoker, *command], capture_output=True, text=True, timeout=180)
    if done.returncode:
        print(f"  {run.name}: exit {done.returncode}: {done.stderr[-600:]}", file=sys.stderr)
    return done.returncode


def diagnosed(run: Path) -> list[dict]:
    command = [sys.executable, "-m", "stoker.cli", "diagnose", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode not in (0, 1):
        print(f"  {run.name}: {done.stderr[-600:]}", file=sys.stderr)
        return []
    return json.loads(done.stdout)["findings"]


def measure_verdict(folder: Path, fault: str, seconds: float, keep: Path | None) -> dict:
    begin = time.monotonic()
    run = (keep or folder) / f"run-{fault}"
    watched(run, job(fault, seconds, folder))
    findings = diagnosed(run)
    first = findings[0] if findings else {"kind": "", "cause": ""}
    wanted = first["kind"] == EXPECTED[fault] and first["cause"] == CAUSES.get(fault, first["cause"])
    others = [f"{finding['kind']}/{finding['cause']}" for finding in findings[1:]]
    print(
        f"{fault:16} {first['kind']}/{first['cause']} {others} {time.monotonic() - begin:.0f} s", flush=True
    )
    return {
        "expected": EXPECTED[fault],
        "found": first["kind"],
        "cause": first["cause"],
        "others": others,
        "right": wanted and not others,
        "share": first.get("share"),
        "evidence": first.get("evidence"),
    }


def measure_cost(folder: Path, seconds: float, turns: int) -> dict:
    """Medians of the step times, in turns alone and watched; the first steps warm up."""
    alone, under = [], []
    for turn in range(turns):
        for medians in (alone, under):
            steps = folder / f"steps-{len(alone)}-{len(under)}.json"
            command = job("fed", seconds, folder, steps)
            if medians is alone:
                subprocess.run(command, check=True, capture_output=True, timeout=120)
            else:
                watched(folder / f"cost-{turn}", command)
            medians.append(statistics.median(json.loads(steps.read_text())[10:]))
    base = statistics.median(alone)
    return {
        "alone_ms": [1e3 * value for value in alone],
        "watched_ms": [1e3 * value for value in under],
        "cost_share": statistics.median(under) / base - 1,
        "null_share": (max(alone) - min(alone)) / base if turns > 1 else None,
    }


def measure_price(folder: Path, seconds: float) -> dict:
    run, what_if = folder / "price", folder / "what-if"
    watched(run, job("starved_steady", seconds, folder))
    foretold = next((f for f in diagnosed(run) if f["kind"] == "data_starvation"), {})
    steps = folder / "what-if.json"
    watched(what_if, job("starved_steady", 2 * seconds, folder, steps), "--what-if", "data")
    done = json.loads(steps.read_text())[15:]
    middle = (min(done) + max(done)) / 2
    real, cached = [s for s in done if s > middle], [s for s in done if s <= middle]
    measured = statistics.median(real) / statistics.median(cached)
    said = foretold.get("speedup_if_gone", 0.0)
    return {"foretold_speedup": said, "measured_speedup": measured, "off_by": abs(said / measured - 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=12)
    parser.add_argument("--turns", type=int, default=3, help="of the cost, alone and watched")
    parser.add_argument("--only", default=",".join(EXPECTED), help="faults, with commas")
    parser.add_argument("--keep", type=Path, help="leave the run folders here")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_watch.json")
    given = parser.parse_args()
    os.environ.setdefault("PYTHONPATH", str(HERE.parent / "src"))
    import torch

    machine = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
    report: dict = {
        "question": __doc__.strip().splitlines()[0],
        "machine": {**machine, "gpu": torch.cuda.get_device_name()},
        "verdicts": {},
    }
    faults = given.only.split(",") if given.only else []
    with tempfile.TemporaryDirectory(prefix="gpu-watch-") as name:
        folder = Path(name)
        for fault in faults:
            report["verdicts"][fault] = measure_verdict(folder, fault, given.seconds, given.keep)
            write(report, given.out)
        if given.turns:
            report["cost"] = measure_cost(folder, given.seconds, given.turns)
            write(report, given.out)
            report["price"] = measure_price(folder, given.seconds)
            write(report, given.out)
    print(json.dumps({key: value for key, value in report.items() if key != "verdicts"}, indent=1))


def write(report: dict, path: Path) -> None:
    """After each part: what is cut short has said what it saw."""
    verdicts = report["verdicts"].values()
    counts = {"right": sum(verdict["right"] for verdict in verdicts), "of": len(verdicts)}
    keep(path, {**report, **counts})


if __name__ == "__main__":
    main()
