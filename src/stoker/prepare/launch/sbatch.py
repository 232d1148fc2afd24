"""sbatch scripts and squeue answers: what is submitted to Slurm and how its answers read. Pure.

A stage is one job array. The largest index a cluster allows is often 1,000, so N elements share the
tasks whatever their number: element I runs lines I, I+N, I+2N ... of the todo file.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from stoker.errors import StokerError

QUEUE_FORMAT = "%F|%K|%T|%r"
# Any other state, known or of a later Slurm, means that the element may still run (again).
_OVER = {
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
}  # fmt: skip


# Someone wanted these to end, or the limit that ended them will do so again.
_MEANT = {"CANCELLED", "COMPLETED", "DEADLINE", "TIMEOUT"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One sbatch call: the script, and the options it is submitted with."""

    script: str
    options: tuple[str, ...]

    def text(self) -> str:
        """The script file, whose second line is the command that submits it again."""
        return f"#!/bin/sh\n# sbatch {shlex.join(self.options)} THIS-FILE\n{self.script}\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Element:
    """An array element, or a job that is no array, as squeue shows it."""

    job: str
    index: str
    state: str
    reason: str

    @property
    def is_over(self) -> bool:
        return self.state in _OVER


def job_name(folder: Path, stage: str) -> str:
    """How a later driver finds the jobs of this folder in the queue."""
    return f"stoker-{stage}-{xxhash.xxh3_64_hexdigest(str(folder).encode())}"


def element_count(tasks: int, *, max_array_size: int) -> int:
    """MaxArraySize is one more than the largest index, so it is the number of elements that fit."""
    return max(1, min(tasks, max_array_size))


def array_submission(
    *, name: str, elements: int, at_once: int, log: Path, worker: Sequence[str], options: Sequence[str]
) -> Submission:
    """A job array whose element I runs the worker with `--slot I/elements`; the name of `log` may hold
    Slurm's %A and %a."""
    throttle = f"%{at_once}" if at_once else ""
    return Submission(
        script=f'exec {shlex.join(worker)} --slot "$SLURM_ARRAY_TASK_ID/{elements}"',
        options=(
            *_options(name, log=log, extra=options),
            f"--array=0-{elements - 1}{throttle}",
        ),
    )


def job_submission(*, name: str, log: Path, command: Sequence[str], options: Sequence[str]) -> Submission:
    """A single job."""
    return Submission(script=f"exec {shlex.join(command)}", options=_options(name, log=log, extra=options))


def after(submission: Submission, jobs: Sequence[str]) -> Submission:
    """The same, begun when those jobs have ended. Not afterok: an array that had one failing element
    never satisfies it, even if that element succeeded when it was run again."""
    if not jobs:
        return submission
    dependency = f"--dependency=afterany:{':'.join(jobs)}"
    return Submission(script=submission.script, options=(*submission.options, dependency))


def _options(name: str, *, log: Path, extra: Sequence[str]) -> tuple[str, ...]:
    """Of equal options sbatch takes the last: a user's come after our defaults, before what must hold."""
    defaults = ("--ntasks=1", "--requeue")
    given = [word for option in extra for word in shlex.split(option)]
    pattern = f"{str(log.parent).replace('%', '%%')}/{log.name}"
    return (*defaults, *given, f"--job-name={name}", f"--output={pattern}", "--open-mode=append")


def parse_job_id(answer: str) -> str:
    """`12` of `sbatch --parsable`, below what some sites print there; a federation answers `12;cluster`."""
    return answer.strip().rpartition("\n")[2].strip().partition(";")[0]


def parse_max_array_size(config: str) -> int:
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", config, re.MULTILINE)
    if not found:
        raise StokerError(
            "`scontrol show config` names no MaxArraySize",
            hint="check that `scontrol show config` works here",
        )
    return int(found[1])


def parse_queue(answer: str) -> list[Element]:
    """The lines of `squeue --array --noheader --format=QUEUE_FORMAT`, whatever else a site prints there."""
    rows = (line.split("|", 3) for line in answer.splitlines() if line.count("|") >= 3)
    return [Element(job=job, index=index, state=state, reason=reason) for job, index, state, reason in rows]


def elements_of(todo: Sequence[int], elements: Mapping[str, Element]) -> Iterator[tuple[int, Element]]:
    """Each task and the array element that ran it, where the queue showed it."""
    for place, number in enumerate(todo):
        if element := elements.get(str(place % max(1, len(elements)))):
            yield number, element


def killed_tasks(todo: Sequence[int], ended: Collection[int], elements: Mapping[str, Element]) -> list[int]:
    """The tasks that never ended because something killed their element: a node, the kernel, kill -9."""
    return [
        number
        for number, element in elements_of(todo, elements)
        if number not in ended and element.is_over and element.state not in _MEANT
    ]


def holding_reason(elements: Sequence[Element]) -> str:
    """Why nothing that is left of a job runs, in Slurm's words; empty while something does."""
    left = [element for element in elements if not element.is_over]
    if any(element.state != "PENDING" for element in left):
        return ""
    return ", ".join(sorted({element.reason for element in left} - {"None", ""}))
