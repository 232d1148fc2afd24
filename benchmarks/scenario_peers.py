"""Do `stoker watch` and traceml-ai name the fault that was put into a job?

Method: every scenario of tests/scenarios (real faults in small jobs on the CPU, three in ten healthy) once
under `stoker watch` and once under `traceml run`, one after the other. Of stoker every finding counts, for
it or against it. traceml-ai is read in its favour:
  * its job has the two lines that it asks of a plain loop (`traceml_job.py`); the scenarios of the quick
    suite also run unchanged, to show what it says then
  * its words are taken for every kind they fit (`FITS`): "residual" names checkpoints and CPU stalls among
    others, so it is right for a save, a hang and a rank that is late
  * everything its step timing lists may earn the point; only its verdict may be wrong
  * "compute-bound" and "no clear bottleneck" are healthy; "insufficient data" is no verdict: a miss, no error
  * pressure that it reports of host and process ("high CPU") is kept beside and costs it nothing

Precision is right findings over all findings of a fault; recall is right findings over injected faults. The
causes of a starved loader are counted apart: traceml-ai has none.

Needs root, for cgroups and a mount. What is known of a scenario is replaced, the rest of the file is kept:

    python benchmarks/scenario_peers.py                       # all, some 12 minutes on two quiet cores
    python benchmarks/scenario_peers.py healthy "late rank"   # these only
    python benchmarks/scenario_peers.py --score               # none: reads the words in the file again
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from kept_runs import keep, newest
from watch_overhead import free_port

ROOT = Path(__file__).parent.parent
REPORT = ROOT / "benchmarks" / "results" / "scenarios.json"
sys.path[:0] = [str(ROOT / "tests" / "scenarios"), str(ROOT / "src")]

from scenarios import JOB, SCENARIOS, Scenario, enact, watched  # noqa: E402
from stoker.diagnose.rules import judge  # noqa: E402
from stoker.errors import StokerError  # noqa: E402

# traceml-ai's kinds, and ours that its own words for them (verdict, reason, next step) can mean.
FITS = {
    "INPUT_BOUND": ("data_starvation",),
    "H2D_BOUND": ("h2d_copy",),
    "RESIDUAL_HEAVY": ("checkpoint_stall", "host_hang", "collective_hang", "straggler"),
    "STRAGGLER": ("straggler", "collective_hang"),
    "INPUT_STRAGGLER": ("straggler", "data_starvation"),
    "COMPUTE_STRAGGLER": ("straggler",),
    "H2D_STRAGGLER": ("straggler", "h2d_copy"),
    "COMPUTE_BOUND": ("healthy",),
    "NO_CLEAR_PERFORMANCE_BOTTLENECK": ("healthy",),
}
CROWDED = 0.3  # cores busy with others' work: contention is then a right cause too, as in the tests


def main() -> None:
    known = newest("scenarios")["scenarios"] if REPORT.exists() else {}
    for scenario in SCENARIOS:
        if not sys.argv[1:] or scenario.name in sys.argv[1:]:
            known[scenario.name] = row = compared(scenario)
            print(f"{scenario.name}: {row['stoker']} | {row['traceml']}", flush=True)
            write(known)
    write(known)


def compared(scenario: Scenario) -> dict[str, object]:
    """What was put in, and what each of the two said of it."""
    row = {
        "injected": list(scenario.kinds),
        "causes": list(scenario.causes),
        "stoker": timed(stoker_says, scenario),
        "traceml": timed(traceml_says, scenario),
    }
    if not scenario.slow:
        row["traceml_unchanged"] = timed(traceml_says, scenario, JOB)
    return row


def timed(ask, scenario: Scenario, *more: Path) -> dict[str, object]:
    """An answer with the seconds it took; a run that fails is an answer without kinds."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            answer = ask(scenario, Path(folder), *more)
        except (OSError, ValueError, StokerError, subprocess.TimeoutExpired) as error:
            answer = {"kinds": [], "failed": f"{type(error).__name__}: {error}"[:400]}
    return {**answer, "seconds": round(time.monotonic() - began, 1)}


# --- stoker -------------------------------------------------------------------------------------------


def stoker_says(scenario: Scenario, folder: Path) -> dict[str, object]:
    seen = watched(scenario, folder, environ={**os.environ, "PYTHONPATH": str(ROOT / "src")})
    found = judge(seen).findings
    others = seen.host.others if seen.host else 0.0
    causes = [*scenario.causes, *(["contention"] if others >= CROWDED else [])]
    answer: dict[str, object] = {"kinds": [one.kind for one in found]}
    if not math.isnan(others):
        answer["others_cores"] = round(others, 2)
    if found:
        answer |= {"cause": found[0].cause, "share": round(found[0].share, 3)}
    if scenario.causes:
        answer["cause_right"] = bool(found) and found[0].cause in causes
    return answer


# --- traceml-ai ---------------------------------------------------------------------------------------


def traceml_says(scenario: Scenario, folder: Path, script: Path | None = None) -> dict[str, object]:
    ports = ["--aggregator-port", str(free_port()), "--master-port", str(free_port())]
    traceml = [str(Path(sys.executable).parent / "traceml"), "run", "--logs-dir", "logs", "--run-name", "run"]
    ranks = ["--nproc-per-node", str(scenario.ranks)]
    job = str(script or ROOT / "benchmarks" / "traceml_job.py")
    done = enact(scenario, folder, [*traceml, *ports, *ranks, job, "--args"], environ=dict(os.environ))
    summary = folder / "logs" / "run" / "final_summary.json"
    if not summary.exists():
        return {"kinds": [], "failed": f"no summary, exit {done.returncode}: {done.stderr.strip()[-300:]}"}
    return read_summary(json.loads(summary.read_text("utf-8")), injected=scenario.kinds)


def read_summary(summary: dict, *, injected: tuple[str, ...]) -> dict[str, object]:
    """traceml-ai's own words, and the kinds they are taken for."""
    verdict, steps = summary["primary_diagnosis"], summary["step_time"]
    listed = [one["kind"] for one in steps.get("issues") or []]
    beside = {name: (summary[name].get("diagnosis") or {}).get("status") for name in ("system", "process")}
    return {
        "kinds": taken_for(verdict["kind"], listed, injected=injected),
        "verdict": verdict["kind"],
        "why": verdict["summary"],
        "next": verdict["action"],
        "step_time_lists": listed,
        "beside": beside,
    }


def taken_for(verdict: str, listed: list[str], *, injected: tuple[str, ...]) -> list[str]:
    """All injected kinds that fit something it lists; its verdict as it is where that fits none of them."""
    meant = FITS.get(verdict, ())
    if not meant or "healthy" in meant:
        return list(meant)
    fitting = {kind for one in (verdict, *listed) for kind in FITS.get(one, ())}
    wrong = [] if set(meant) & set(injected) else [verdict.lower()]
    return [kind for kind in injected if kind in fitting] + wrong


# --- scores -------------------------------------------------------------------------------------------


def score(rows: dict[str, dict], who: str) -> dict[str, float]:
    """Right findings over those said, and over faults put in; what was said of healthy runs."""
    right = wrong = faults = false_alarms = silent = 0
    for row in rows.values():
        injected, said = set(row["injected"]) - {"healthy"}, set(row[who]["kinds"]) - {"healthy"}
        right += len(said & injected)
        wrong += len(said - injected)
        faults += len(injected)
        false_alarms += bool(said and not injected)
        silent += not row[who]["kinds"]
    return {
        "precision": right / max(right + wrong, 1),
        "recall": right / max(faults, 1),
        "false_alarms": false_alarms,
        "no_verdict": silent,
        "right_runs": sum(sorted(row["injected"]) == sorted(row[who]["kinds"]) for row in rows.values()),
    }


def write(known: dict[str, dict]) -> None:
    rows = {one.name: read_again(known[one.name]) for one in SCENARIOS if one.name in known}
    caused = [row["stoker"] for row in rows.values() if row["causes"]]
    report = {
        "question": __doc__.partition("\n")[0],
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "device": "cpu"},
        "versions": {name: metadata.version(name) for name in ("torch", "traceml-ai")},
        "suite": len(SCENARIOS),
        "runs": len(rows),
        "healthy": sum(row["injected"] == ["healthy"] for row in rows.values()),
        "stoker": score(rows, "stoker"),
        "traceml": score(rows, "traceml"),
        "causes": {"right": sum(bool(one.get("cause_right")) for one in caused), "of": len(caused)},
        "fits": FITS,
        "scenarios": rows,
    }
    keep(REPORT, report)


def read_again(row: dict) -> dict:
    """A row with traceml-ai's words taken as `FITS` has them now."""
    said = {name: row[name] for name in ("traceml", "traceml_unchanged") if "verdict" in row.get(name, {})}
    for name, one in said.items():
        kinds = taken_for(one["verdict"], one["step_time_lists"], injected=tuple(row["injected"]))
        said[name] = {**one, "kinds": kinds}
    return {**row, **said}


if __name__ == "__main__":
    main()
