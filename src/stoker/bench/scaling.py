"""Scaling benchmark: the user's job on 1 to N ranks of this node, how efficient, and where the rest goes.

Weak scaling, as training has it: each rank keeps its batch. Numbers of ranks are run up and then down again,
so that a machine that drifts favours none. Where a step takes longer is read from recordings of watch.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stoker.bench.figures import Bench, Figure, say_seconds
from stoker.bench.program import program_of
from stoker.diagnose.features import features
from stoker.errors import StokerError, UsageError
from stoker.formats.sizes import counted
from stoker.recording import Recording
from stoker.watch.command import name_of
from stoker.watch.window import Window

_OPTIONS = (
    "--nproc-per-node", "--nproc_per_node", "--num-processes", "--num_processes", "--ntasks", "-np", "-n",
)  # fmt: skip
_LAUNCHERS = (
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
    "accelerate",
    "srun",
    "mpirun",
    "mpiexec",
)
_SMALL = 0.02  # of a step: less is noise
_WORDS = {
    "data": "waiting for batches",
    "collective": "waiting for other ranks and the link",
    "compute": "computing",
    "copy": "copies to the card",
    "sync": "waiting for the card",
    "checkpoint": "saving",
    "evaluation": "evaluating",
    "stalled": "standing still",
}
Said = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A launcher's command, and where in it the number of ranks stands."""

    command: tuple[str, ...]
    at: int  # of the word that holds it
    ranks: int

    def on(self, ranks: int) -> tuple[str, ...]:
        """The same command on another number."""
        word = self.command[self.at]
        name, equals, _ = word.rpartition("=")
        return (*self.command[: self.at], f"{name}{equals}{ranks}", *self.command[self.at + 1 :])


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """One window: seconds of a step, and of them how many went where."""

    ranks: int
    step_s: float
    parts: dict[str, float]


def bench_scaling(
    command: Sequence[str], *, seconds: float = 5.0, said: Said = lambda name, done, of: None
) -> Bench:
    """Steps of 1, 2, 4 … N ranks, where the launcher is told N."""
    launch = read_launch(command)
    counts = rank_counts(launch.ranks)
    order = [*counts, *reversed(counts)]
    # torchrun gives several ranks one thread each, and a single one every core: here all have the same.
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    windows: dict[int, list[Ran]] = {count: [] for count in counts}
    with program_of(command) as program:
        for number, count in enumerate(order):
            said(counted(count, "rank"), number, len(order))
            name = f"{number}-of-{count}"
            window = Window(program.folder / name, seconds=seconds)
            window.grace_s = 10.0
            program.run(name, window, environ=threads, command=launch.on(count))
            recording = program.read(name)
            if len(recording.ranks) != count:
                raise StokerError(
                    f"{counted(count, 'rank')} asked for, and {len(recording.ranks)} stepped: "
                    f"{program.tail(name)}",
                    hint="does the program run on any number of ranks?",
                )
            windows[count].append(read_ran(recording))
    return report(name_of(command), windows, threads=threads["OMP_NUM_THREADS"])


def read_launch(command: Sequence[str]) -> Launch:
    """Where a launcher's own options say how many ranks; those of the script behind it are not looked at."""
    if not any(one in os.path.basename(word) for word in command[:3] for one in _LAUNCHERS):
        raise UsageError(
            f"{command[0]} starts no ranks",
            hint="stoker bench scaling -- torchrun --nproc-per-node 4 train.py",
        )
    for at, word in enumerate(command):
        if word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name in _OPTIONS:
            at, value = (at, value) if equals else (at + 1, command[at + 1] if at + 1 < len(command) else "")
            if not value.isdecimal() or int(value) < 2:
                raise UsageError(
                    f"{name} {value}: not a number of ranks from 2 on", hint=f"write {name} 4, say"
                )
            return Launch(command=tuple(command), at=at, ranks=int(value))
    raise UsageError(
        "the launcher is not told how many ranks",
        hint="torchrun --nproc-per-node 4, srun --ntasks 4, mpirun -np 4",
    )


def rank_counts(most: int) -> list[int]:
    """1, 2, 4 … and the most."""
    counts = [1]
    while counts[-1] * 2 < most:
        counts.append(counts[-1] * 2)
    return [*counts, most]


def read_ran(recording: Recording) -> Ran:
    known = features(recording)
    loop = known.loop
    steps = max((rank.steps for rank in recording.ranks), key=lambda one: len(one.end))
    if len(steps.end) < 5 or known.judged_s <= 0:
        raise StokerError(
            f"too few to measure: {counted(len(steps.end), 'step')} seen",
            hint="give more --seconds, or smaller steps",
        )
    after = steps.end[len(steps.end) // 4 :]
    step_s = float(after[-1] - after[0]) / (len(after) - 1)
    return Ran(
        ranks=len(recording.ranks),
        step_s=step_s,
        parts={name: loop.share[name] * step_s for name in _WORDS if loop.share.get(name, 0.0) > 0},
    )


def report(name: str, windows: dict[int, list[Ran]], *, threads: str) -> Bench:
    """Efficiency is what one rank's step takes, over what it takes among others."""
    alone = statistics.median(one.step_s for one in windows[1])
    figures = []
    for count, some in windows.items():
        step_s = statistics.median(one.step_s for one in some)
        spread = max(one.step_s for one in some) / min(one.step_s for one in some) - 1
        figures.append(
            Figure(
                name=f"efficiency, {counted(count, 'rank')}",
                value=alone / step_s,
                unit="share",
                limit=_where(windows[1], some) if count > 1 else "",
                beside={"step_s": step_s, "as_one_rank": count * alone / step_s, "apart_share": spread},
            )
        )
    most = max(windows)
    lost = 1 - figures[-1].value
    return Bench(
        verb="scaling",
        of=f"{name} on up to {counted(most, 'rank')} of this node, its batch and "
        f"OMP_NUM_THREADS={threads} on each",
        figures=figures,
        advice=[_advice(most, lost, windows)],
    )


def _grown(one: list[Ran], many: list[Ran]) -> list[tuple[float, str]]:
    """By how many seconds each part of a step grew, most first."""

    def part(some: list[Ran], name: str) -> float:
        return statistics.fmean(ran.parts.get(name, 0.0) for ran in some)

    return sorted(((part(many, name) - part(one, name), name) for name in _WORDS), reverse=True)


def _where(one: list[Ran], many: list[Ran]) -> str:
    step_s = statistics.median(ran.step_s for ran in many)
    said = [
        f"{_WORDS[name]} +{say_seconds(more)}" for more, name in _grown(one, many) if more > _SMALL * step_s
    ]
    return ", ".join(said[:3])


def _advice(most: int, lost: float, windows: dict[int, list[Ran]]) -> str:
    if lost <= 0.05:
        return f"{counted(most, 'rank')} work as {most}: nothing is lost that is worth looking for"
    where = _grown(windows[1], windows[most])[0][1]
    does = {
        "data": "loaders share cores and disk: `stoker bench loader -- …`, then `stoker tune -- …`",
        "collective": "`stoker bench collective` says what the link gives; larger batches exchange less",
        "compute": "ranks share cores or memory: bind each to its own (`--cpu-bind`, numactl)",
    }
    cause = does.get(where, f"{_WORDS[where]} has grown most")
    return f"{lost:.0%} of a step is lost on {counted(most, 'rank')}: {cause}"
