"""The scenarios: small jobs with one fault each (or none, or two), and how one of them is run and judged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import surroundings

from stoker.diagnose.features import Features, features
from stoker.watch.runs import read_recording

JOB = Path(__file__).parent / "job.py"
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A job, the machine it runs on, and what is wrong with it; any of `causes` is right."""

    name: str
    job: str
    kinds: tuple[str, ...]
    causes: tuple[str, ...] = ()
    machine: Callable[[Path], AbstractContextManager[list[str]]] = surroundings.plain
    ranks: int = 1
    slow: bool = True


SCENARIOS = (
    Scenario(name="healthy", job="--steps 100", kinds=("healthy",), slow=False),
    Scenario(name="healthy with a worker", job="--workers 1 --steps 150", kinds=("healthy",)),
    Scenario(name="healthy larger steps", job="--size 2048 --steps 40", kinds=("healthy",)),
    Scenario(name="healthy cheap saves", job="--save 60 --save-mib 1 --steps 150", kinds=("healthy",)),
    Scenario(
        # 4% of a step; a whole millisecond is 7.5% of it on a quick day, which is said, and rightly so
        name="healthy quick batches",
        job="--batch sleep --seconds 0.0005 --steps 150",
        kinds=("healthy",),
    ),
    Scenario(name="healthy two threads", job="--threads 2 --steps 60", kinds=("healthy",)),
    Scenario(name="healthy two ranks", job="--steps 80", kinds=("healthy",), ranks=2),
    Scenario(name="healthy one late batch", job="--workers 1 --start 1 --steps 150", kinds=("healthy",)),
    Scenario(
        name="sleeping loader",
        job="--batch sleep --seconds 0.06 --steps 60",
        kinds=("data_starvation",),
        causes=("lock",),
        slow=False,
    ),
    Scenario(
        name="sleeping workers",
        job="--batch sleep --seconds 0.3 --workers 2 --steps 50",
        kinds=("data_starvation",),
        causes=("lock",),
    ),
    Scenario(
        name="decoding",
        job="--batch compute --seconds 0.06 --steps 60",
        kinds=("data_starvation",),
        causes=("cpu",),
    ),
    Scenario(
        name="too few workers",
        job="--batch compute --seconds 0.15 --workers 1 --steps 50",
        kinds=("data_starvation",),
        causes=("too_few_workers", "cpu"),  # two cores leave no room for a second worker
    ),
    Scenario(
        name="slow disk",
        job="--batch read --file data.bin --workers 1 --steps 60",
        kinds=("data_starvation",),
        causes=("storage",),
        machine=surroundings.slow_disk,
    ),
    Scenario(
        name="CPU quota",
        job="--batch compute --seconds 0.03 --workers 1 --steps 40 --size 64",
        kinds=("data_starvation",),
        causes=("quota",),
        machine=surroundings.half_a_core,
    ),
    Scenario(
        name="one core allowed",
        job="--batch compute --seconds 0.06 --workers 2 --steps 50",
        kinds=("data_starvation",),
        causes=("cpu",),
        machine=surroundings.one_core,
    ),
    Scenario(
        name="busy neighbours",
        job="--batch compute --seconds 0.06 --workers 1 --steps 50",
        kinds=("data_starvation",),
        causes=("contention",),
        machine=surroundings.busy_neighbours,
    ),
    Scenario(
        name="oversubscribed threads",
        job="--batch crowd --batch-threads 8 --workers 4 --steps 50",
        kinds=("data_starvation",),
        causes=("cpu",),
    ),
    Scenario(
        name="red herring",  # it reads from a disk, and has no core to do it with
        job="--batch compute --seconds 0.06 --workers 3 --file data.bin --steps 60",
        kinds=("data_starvation",),
        causes=("cpu",),
        machine=surroundings.one_core,
    ),
    Scenario(
        name="epochs",
        job="--workers 1 --epoch 20 --start 0.5 --steps 100",
        kinds=("data_starvation",),
        causes=("startup",),
        slow=False,
    ),
    Scenario(
        name="tiny shm",
        job="--batch big --workers 2 --steps 200 --die-after 20",
        kinds=("shm_pressure",),
        machine=surroundings.tiny_shm,
    ),
    Scenario(
        name="saving",
        job="--save 20 --save-mib 300 --steps 80",
        kinds=("checkpoint_stall",),
        slow=False,
    ),
    Scenario(name="standing", job="--stop-at 40 --die-after 25 --steps 60", kinds=("host_hang",)),
    Scenario(name="late rank", job="--late 0.1 --steps 50", kinds=("straggler",), ranks=2),
    Scenario(
        name="sleeping rank",
        job="--stop-at 20 --die-after 30 --steps 60",
        kinds=("collective_hang",),
        ranks=2,
    ),
    Scenario(
        name="another collective",
        job="--skip-at 20 --die-after 30 --steps 60",
        kinds=("collective_hang",),
        ranks=2,
    ),
    Scenario(
        name="sleeping loader and saving",
        job="--batch sleep --seconds 0.15 --save 20 --save-mib 200 --steps 60",
        kinds=("data_starvation", "checkpoint_stall"),
    ),
)


def watched(scenario: Scenario, folder: Path, *, environ: dict[str, str]) -> Features:
    """Run the scenario's job under `stoker watch`, and what its run folder shows."""
    launch = TORCHRUN if scenario.ranks > 1 else []
    watch = [sys.executable, "-m", "stoker.cli", "watch", "--hz", "5", "--out", "run", "--"]
    enact(scenario, folder, [*watch, sys.executable, *launch, str(JOB)], environ=environ)
    return features(read_recording(folder / "run"))


def enact(
    scenario: Scenario, folder: Path, command: list[str], *, environ: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run a command that takes the job's options, in the folder and on the machine of the scenario."""
    if "data.bin" in scenario.job:
        (folder / "data.bin").write_bytes(bytes(64 << 20))
    with scenario.machine(folder) as before:
        return subprocess.run(
            [*before, *command, *scenario.job.split()],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=150,
        )
