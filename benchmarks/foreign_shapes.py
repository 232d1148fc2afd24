"""Does `stoker watch` name what is wrong in programs that others write, and call the healthy ones healthy?

Method: every program of tests/scenarios/foreign (loops as the tutorials of their frameworks write them) with
every fault it can have, once each under `stoker watch`; the first verdict, its line and the number of steps
are held against what was put in. Kept are the rows and a confusion matrix: injected by first verdict.

    python benchmarks/foreign_shapes.py                   # all, some 30 minutes on two quiet cores
    python benchmarks/foreign_shapes.py --old CHECKOUT    # and what an older one says: twice as long
    python benchmarks/foreign_shapes.py own_loop gan      # these programs only
    python benchmarks/foreign_shapes.py --out FILE …      # kept elsewhere
    python benchmarks/foreign_shapes.py --rows FOLDER --seconds 270   # in pieces, several at once: a case is
                                                          # run once; kept when all of them are there, with
                                                          # what --old said of those it was asked for
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from kept_runs import RESULTS, keep
from watch_overhead import free_port

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests" / "scenarios"), str(ROOT / "src")]

from foreign_shapes import Case, cases, judged, watched  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("programs", nargs="*")
    parser.add_argument("--faults", nargs="*", default=None)
    parser.add_argument("--old", type=Path, help="a checkout of an older stoker, to be asked too")
    parser.add_argument("--out", type=Path, default=RESULTS / "foreign_shapes.json")
    parser.add_argument("--rows", type=Path, help="a folder of cases that were run: others are")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case after so many")
    given = parser.parse_args()
    wanted = [one for one in cases() if not given.programs or one.program in given.programs]
    wanted = [one for one in wanted if given.faults is None or one.fault in given.faults]
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.rows or Path(scratch)
        folder.mkdir(exist_ok=True)
        until = time.monotonic() + given.seconds
        for case in wanted:
            if time.monotonic() < until:
                run_once(case, folder / f"{case.name}.json", old=given.old)
        rows = {case.name: row for case in wanted if (row := read(folder / f"{case.name}.json"))}
    if len(rows) == len(wanted):
        keep(given.out, report(rows))
    print(report(rows)["right"], "of", len(rows), "right;", len(wanted) - len(rows), "were not run")


def run_once(case: Case, path: Path, *, old: Path | None) -> None:
    """Its row, in a file of its own; the empty file is a claim."""
    try:
        path.open("x").close()
    except FileExistsError:
        row = read(path)
        if old and row and "old" not in row:
            path.write_text(json.dumps({**row, "old": run_old(case, old)}))
        return
    row = run(case)
    if old:
        row["old"] = run_old(case, old)
    path.write_text(json.dumps(row))
    said = "right" if row["right"] else "WRONG"
    print(f"{said}  {case.name}: {row['first']} {row['cause']}", flush=True)


def read(path: Path) -> dict:
    text = path.read_text() if path.exists() else ""
    return json.loads(text) if text else {}


def _environ(source: Path) -> dict[str, str]:
    paths = [str(source / "src"), os.environ.get("PYTHONPATH")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_old(case: Case, source: Path) -> dict:
    """The first verdict of another version, in its own words: its recordings are its own to read."""
    environ = _environ(source)
    with tempfile.TemporaryDirectory() as folder:
        watched(case, Path(folder), environ=environ, port=free_port())
        diagnose = [sys.executable, "-m", "stoker.cli", "diagnose", "--json", "run"]
        done = subprocess.run(diagnose, cwd=folder, env=environ, capture_output=True, text=True)
    findings = json.loads(done.stdout)["findings"] if done.returncode in (0, 1) else []
    first = findings[0] if findings else {"kind": "nothing", "cause": ""}
    wanted = case.verdict
    right = first["kind"] == wanted.kind and (not wanted.causes or first["cause"] in wanted.causes)
    return {"first": first["kind"], "cause": first["cause"] or "", "verdict": right}


def run(case: Case) -> dict:
    environ = _environ(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        done = watched(case, Path(folder), environ=environ, port=free_port())
        found = judged(case, Path(folder))
    return {
        **asdict(found),
        "right": found.right,
        "injected": case.verdict.kind,
        "hang_said": "host hang" in done.stderr,
    }


def report(rows: dict[str, dict]) -> dict:
    confusion, old = dict[str, Counter](), dict[str, Counter]()
    for row in rows.values():
        confusion.setdefault(row["injected"], Counter())[row["first"]] += 1
        if "old" in row:
            old.setdefault(row["injected"], Counter())[row["old"]["first"]] += 1
    healthy = [row for row in rows.values() if row["injected"] == "healthy"]
    return {
        "runs": len(rows),
        "right": sum(row["right"] for row in rows.values()),
        "verdict_right": sum(row["verdict"] for row in rows.values()),
        "false_alarms": sum(row["first"] != "healthy" for row in healthy),
        "confusion": {kind: dict(counts) for kind, counts in confusion.items()},
        "confusion_old": {kind: dict(counts) for kind, counts in old.items()},
        "versions": {"torch": metadata.version("torch"), "python": sys.version.split()[0]},
        "rows": rows,
    }


if __name__ == "__main__":
    main()
