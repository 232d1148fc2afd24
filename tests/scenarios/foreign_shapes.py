"""Other people's loops and what goes wrong in them: which program, which fault, which first verdict.

The programs lie in `foreign/`, each as its framework's tutorial writes it; none knows of stoker. A fault is
chosen by the environment, so that the same program is also seen healthy.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from stoker.diagnose.rules import diagnose
from stoker.watch.runs import read_recording

PROGRAMS = Path(__file__).parent / "foreign"
STEPS = {
    "own_loop": 120, "hand_sgd": 120, "timm_like": 120, "accelerated": 100, "lit": 100, "hf_trainer": 80,
    "gan": 150, "lbfgs": 60, "custom_optimizer": 60, "notebook": 120, "keras_like": 130, "ranks": 100,
    "fastai_like": 120, "trl_like": 100,
}  # fmt: skip
OWN = (
    "own_loop",
    "hand_sgd",
    "gan",
    "lbfgs",
    "notebook",
    "keras_like",
    "trl_like",
)  # loops that make their own batches
LOADED = ("timm_like", "accelerated", "lit", "hf_trainer")
OTHERS = ("custom_optimizer", "fastai_like")
SPAWNED = "ranks"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What the first finding must be: its kind, one of these causes, a word of its summary or evidence."""

    kind: str
    causes: tuple[str, ...] = ()
    says: str = ""


FAULTS = {
    "": Verdict(kind="healthy"),
    "clean-up": Verdict(kind="healthy"),
    "slow batch": Verdict(kind="data_starvation", causes=("own_loop",), says="slow_decode"),
    "slow tokenising": Verdict(kind="data_starvation", causes=("own_loop",), says="tokenize"),
    "slow dataset": Verdict(kind="data_starvation", says="slow_sample"),
    "blocking logger": Verdict(kind="host_code", causes=("logging",), says="_send"),
    "per-parameter metrics": Verdict(kind="host_code", causes=("metrics",), says="gradient_stats"),
    "print flood": Verdict(kind="host_code", causes=("output",), says="show_progress"),
    "gc": Verdict(kind="host_code", causes=("gc",), says="collect_garbage"),
    "GIL thread": Verdict(kind="host_code", causes=("gil",), says="_count_forever"),
    "heavy evaluation": Verdict(kind="evaluation"),
    "slow optimizer": Verdict(kind="host_code", causes=("optimizer",), says="slow_update"),
    "crash": Verdict(kind="crashed", causes=("exception",), says="loss is nan at step"),
    "worker SIGKILL": Verdict(kind="crashed", causes=("worker",), says="loader worker killed by SIGKILL"),
    "worker SIGBUS": Verdict(kind="shm_pressure", says="bus error"),
    "rank SIGKILL": Verdict(kind="crashed", causes=("signal",), says="rank 1 killed by SIGKILL"),
    "SIGTERM": Verdict(kind="preempted", causes=("signal",)),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One program with one fault; `how` starts the ranks of those that have several."""

    program: str
    fault: str
    how: str = ""

    @property
    def name(self) -> str:
        return " · ".join(filter(None, [self.program, self.how, self.fault or "healthy"]))

    @property
    def verdict(self) -> Verdict:
        return FAULTS[self.fault]


def cases() -> list[Case]:
    """Every program healthy, and every fault in the programs that can have it."""
    everywhere = (
        "",
        "blocking logger",
        "per-parameter metrics",
        "print flood",
        "gc",
        "GIL thread",
        "crash",
        "SIGTERM",
    )
    found = [Case(program=one, fault=fault) for one in (*OWN, *LOADED, *OTHERS) for fault in everywhere]
    found += [Case(program=one, fault=fault) for one in OWN for fault in ("slow batch", "slow tokenising")]
    found += [Case(program=one, fault=fault) for one in LOADED[1:] for fault in ("slow dataset",)]
    found += [Case(program=one, fault=f"worker {name}") for one in LOADED for name in ("SIGKILL", "SIGBUS")]
    found += [
        Case(program=one, fault="heavy evaluation")
        for one in ("own_loop", "hand_sgd", "fastai_like", *LOADED[:1], *LOADED[2:])
    ]
    found += [Case(program=one, fault="slow optimizer") for one in (*OTHERS, "hand_sgd", "keras_like")]
    found += [Case(program="own_loop", fault="clean-up"), Case(program="lit", fault="clean-up")]
    for how in ("spawn", "forkserver", "torchrun", "mpirun"):
        found += [
            Case(program=SPAWNED, fault=fault, how=how)
            for fault in ("", "slow batch", "rank SIGKILL", "SIGTERM")
        ]
    return found


# What is healthy on a quiet machine may not be beside another test: such cases are for the nightly part.
QUICK = (
    Case(program="own_loop", fault="slow batch"),
    Case(program="timm_like", fault="worker SIGKILL"),
    Case(program="hand_sgd", fault="crash"),
)

# mpirun stands for any launcher that is no Python: it sets variables, waits, and ends the others by SIGTERM.
_MPIRUN = """
for rank in 0 1; do OMPI_COMM_WORLD_RANK=$rank OMPI_COMM_WORLD_SIZE=2 "$@" & pids="$pids $!"; done
code=0
wait -n || { code=$?; kill $pids 2>/dev/null; }
wait
exit $code
"""


def watched(
    case: Case, folder: Path, *, environ: dict[str, str], port: int
) -> subprocess.CompletedProcess[str]:
    """Run the case under `stoker watch`, into `folder / "run"`."""
    program = [sys.executable, str(PROGRAMS / f"{case.program}.py")]
    launch = {
        "spawn": [*program, "spawn"],
        "forkserver": [*program, "forkserver"],
        "torchrun": [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
            "--master-port", str(port), program[1],
        ],
        "mpirun": ["bash", "-c", _MPIRUN, "mpirun", *program],
    }  # fmt: skip
    command = launch.get(case.how, program)
    watch = [
        sys.executable,
        "-m",
        "stoker.cli",
        "watch",
        "--hz",
        "5",
        "--gpu",
        "none",
        "--out",
        "run",
        "--",
        *command,
    ]
    return subprocess.run(
        watch,
        cwd=folder,
        env={**environ, "FAULT": case.fault, "PORT": str(port), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What was said first of a case, and whether that, its line and the number of steps are right."""

    first: str
    cause: str
    verdict: bool
    line: bool
    steps: int
    steps_right: bool
    text: str

    @property
    def right(self) -> bool:
        return self.verdict and self.line and self.steps_right


def judged(case: Case, folder: Path) -> Judged:
    """Read the run and hold its first verdict against what was put in."""
    recording = read_recording(folder / "run")
    findings = diagnose(recording).findings
    first = findings[0] if findings else None
    wanted = case.verdict
    said = " ".join([first.summary, *first.evidence]) if first else ""
    steps = max((len(rank.steps.end) for rank in recording.ranks), default=0)
    whole = wanted.kind not in ("crashed", "preempted", "shm_pressure")
    return Judged(
        first=first.kind if first else "nothing",
        cause=first.cause if first else "",
        verdict=first is not None
        and first.kind == wanted.kind
        and (not wanted.causes or first.cause in wanted.causes),
        line=wanted.says in said,
        steps=steps,
        steps_right=abs(steps - STEPS[case.program]) <= 1 if whole else 0 < steps <= STEPS[case.program],
        text=first.summary if first else "",
    )
