"""Slurm job arrays: submit what is missing, and follow it or leave it to itself.

    FOLDER/slurm/map.todo        the tasks that were missing when the array was submitted
    FOLDER/slurm/map.sh          what its elements run, and how it was submitted
    FOLDER/slurm/map-12_3.log    what element 3 of job 12 printed
    FOLDER/slurm/jobs.txt        every job submitted for this folder, for people and for sacct

Jobs outlive the driver. Their name holds a hash of the folder, so a later driver finds them in the
queue even if the one before it was killed before it could write an id down.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from stoker.errors import StokerError, TaskError
from stoker.formats.sizes import counted
from stoker.prepare.launch.ledger import Ledger
from stoker.prepare.launch.sbatch import (
    QUEUE_FORMAT,
    Element,
    Submission,
    after,
    array_submission,
    element_count,
    elements_of,
    holding_reason,
    job_name,
    job_submission,
    killed_tasks,
    parse_job_id,
    parse_max_array_size,
    parse_queue,
)
from stoker.storage import new_file

MERGE = "merge"

# Between looks at the queue: a tenth of the time waited so far, so that a short job is not waited for
# long and a long one does not trouble the controller.
_LOOK_S = (0.2, 10.0)
_TRIES = 3  # of a task whose element was killed: as often as a local worker or a Ray task
_SQUEUE_TRIES = 18  # at 10 s each: a controller that restarts is back within three minutes


class SlurmArray:
    """Runs each stage as a job array; tasks see the folder, the Python and the paths that we see."""

    def __init__(
        self,
        *,
        entry: str,
        options: Sequence[str] = (),
        at_once: int = 0,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self._entry, self._options, self._at_once, self._say = entry, tuple(options), at_once, say

    def run(self, ledger: Ledger, stage: str, numbers: Sequence[int], on_done: Callable[[int], None]) -> None:
        """Run the tasks; each that ends, well or not, is passed to `on_done`.

        If an array that an earlier driver submitted is still there, it is waited for first, and only
        what it leaves undone is submitted.
        """
        _refuse_beside_detached(ledger.folder)
        waiting = set(numbers)

        def report(ended: Iterable[int]) -> None:
            for number in sorted(ended):
                waiting.remove(number)
                on_done(number)

        if jobs := _live_jobs(ledger.folder, stage):
            self._say(
                f"waiting for job {' '.join(jobs)}, submitted earlier; `scancel {' '.join(jobs)}` ends it"
            )
            self._follow(ledger.folder, stage, jobs, lambda: report(ledger.finished(stage, waiting)))
        todo = sorted(waiting)
        for left in reversed(range(_TRIES)):
            if todo:
                todo = self._run_array(
                    ledger, stage, todo, lambda: report(ledger.ended(stage, waiting)), left
                )
        report(waiting)

    def _run_array(
        self, ledger: Ledger, stage: str, todo: Sequence[int], look: Callable[[], None], left: int
    ) -> list[int]:
        """Run these as one array; returns those to submit again: their element was killed, and nobody who
        meant it did that. With no try left nothing is, and every task that ended unheard gets its reason."""
        ledger.forget_failures(stage, todo)
        job = self._submit_stage(ledger, stage, todo, behind=())
        self._say(f"submitted job {job}; Ctrl-C leaves it running, `scancel {job}` ends it")
        ended = self._follow(ledger.folder, stage, [job], look)
        killed = killed_tasks(todo, ledger.ended(stage, todo), ended) if left else []
        _explain(ledger, stage, todo, ended, but=killed)
        look()
        if killed:
            self._say(f"{counted(len(killed), 'task')} of job {job} died with their element; trying again")
        return killed

    def submit_all(
        self, ledger: Ledger, stages: Mapping[str, Sequence[int]], *, merge: Sequence[str]
    ) -> dict[str, list[str]]:
        """Submit the tasks of all stages, each behind the one before it, and last `merge`, a Python
        module with its arguments. Returns the job ids of each; those still there serve as they are."""
        if _live_jobs(ledger.folder, MERGE):
            self._say("this run is already submitted")
            jobs = {stage: _live_jobs(ledger.folder, stage) for stage in (*stages, MERGE)}
            return {stage: ids for stage, ids in jobs.items() if ids}
        jobs, behind = {}, list[str]()
        for stage, numbers in stages.items():
            ids = _live_jobs(ledger.folder, stage)
            if numbers and not ids:
                ledger.forget_failures(stage, numbers)
                ids = [self._submit_stage(ledger, stage, numbers, behind=behind)]
            if ids:
                jobs[stage] = behind = ids
        jobs[MERGE] = [self._submit_merge(ledger.folder, merge, behind)]
        return jobs

    def _submit_stage(
        self, ledger: Ledger, stage: str, numbers: Sequence[int], *, behind: Sequence[str]
    ) -> str:
        folder = ledger.folder / "slurm"
        todo = folder / f"{stage}.todo"
        with new_file(todo) as file:
            file.write("".join(f"{number}\n" for number in numbers).encode())
        worker = [
            sys.executable, "-m", "stoker.prepare.launch.worker", self._entry, str(ledger.folder), stage,
            "--plan", ledger.plan, "--todo", str(todo),
        ]  # fmt: skip
        submission = array_submission(
            name=job_name(ledger.folder, stage),
            elements=element_count(len(numbers), max_array_size=_max_array_size()),
            at_once=self._at_once,
            log=folder / f"{stage}-%A_%a.log",
            worker=worker,
            options=self._options,
        )
        return _submit(folder, stage, after(submission, behind))

    def _submit_merge(self, folder: Path, module: Sequence[str], behind: Sequence[str]) -> str:
        submission = job_submission(
            name=job_name(folder, MERGE),
            log=merge_log(folder),
            command=[sys.executable, "-m", *module],
            options=self._options,
        )
        return _submit(folder / "slurm", MERGE, after(submission, behind))

    def _follow(
        self, folder: Path, stage: str, jobs: Sequence[str], look: Callable[[], None]
    ) -> dict[str, Element]:
        """Look at the ledger until the queue holds nothing of these jobs; returns how each index ended."""
        started, said = time.monotonic(), ""
        seen: dict[str, Element] = {}  # the controller forgets elements that ended some minutes ago
        while True:
            elements = [element for element in _queue_patiently(folder, stage) if element.job in jobs]
            seen.update({element.index: element for element in elements})
            look()
            if all(element.is_over for element in elements):
                return seen
            if (reason := holding_reason(elements)) not in ("", said):
                said = reason
                self._say(f"job {' '.join(jobs)} is pending: {reason}")
            time.sleep(min(max(_LOOK_S[0], (time.monotonic() - started) / 10), _LOOK_S[1]))


def merge_log(folder: Path) -> Path:
    """Beside the work folder, which a merge that succeeds deletes."""
    return folder.with_name(f"{folder.name}-merge.log")


def _submit(folder: Path, stage: str, submission: Submission) -> str:
    script = folder / f"{stage}.sh"
    with new_file(script) as file:
        file.write(submission.text().encode())
    job = parse_job_id(_slurm("sbatch", "--parsable", *submission.options, str(script)))
    with (folder / "jobs.txt").open("a", encoding="utf-8") as record:
        record.write(f"{job} {stage}\n")
    return job


def _live_jobs(folder: Path, stage: str) -> list[str]:
    """The jobs of a stage that are not over, each once."""
    return list(dict.fromkeys(element.job for element in _queue(folder, stage) if not element.is_over))


def _queue(folder: Path, stage: str) -> list[Element]:
    # Asked by name: a job id that the controller has forgotten is an error, a name is an empty answer.
    name = job_name(folder, stage)
    return parse_queue(
        _slurm(
            "squeue", "--noheader", "--array", "--states=all", f"--name={name}", f"--format={QUEUE_FORMAT}"
        )
    )


def _queue_patiently(folder: Path, stage: str) -> list[Element]:
    """A controller may be busy or restarting, and the jobs of hours are not to be given up for that."""
    for _ in range(_SQUEUE_TRIES - 1):
        with suppress(StokerError):
            return _queue(folder, stage)
        time.sleep(_LOOK_S[1])
    return _queue(folder, stage)


def _max_array_size() -> int:
    return parse_max_array_size(_slurm("scontrol", "show", "config"))


def _refuse_beside_detached(folder: Path) -> None:
    """The chain of a detached run finishes the dataset and removes the folder: nobody else may."""
    if jobs := _live_jobs(folder, MERGE):
        raise StokerError(
            f"a detached run is making this dataset; its last job is {jobs[0]}",
            hint=f"`squeue --job {jobs[0]}` shows it; to take over, `scancel {jobs[0]}` and run this again",
        )


def _explain(
    ledger: Ledger,
    stage: str,
    todo: Sequence[int],
    elements: Mapping[str, Element],
    *,
    but: Sequence[int],
) -> None:
    """Write down why tasks have neither a marker nor a reason: Slurm ended their element."""
    ended = ledger.ended(stage, todo).union(but)
    if not ended:
        states = ", ".join(sorted({element.state for element in elements.values()}))
        raise TaskError(
            f"the {stage} job ended ({states or 'unseen'}) without having run a task",
            hint=f"see the logs in {ledger.folder / 'slurm'}; every node must see it and this Python",
        )
    for number, element in elements_of(todo, elements):
        if number not in ended:
            name = f"{element.job}_{element.index}"
            log = ledger.folder / "slurm" / f"{stage}-{name}.log"
            ledger.fail(stage, number, TaskError(f"array element {name} ended {element.state}; see {log}"))


def _slurm(*command: str) -> str:
    """Run a Slurm command and return what it says. What a user has squeue leave out by default, as with
    SQUEUE_PARTITION or SQUEUE_USERS, would look to us like jobs that have ended."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SQUEUE_")}
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout
    except FileNotFoundError as error:
        raise StokerError(
            f"{command[0]} is not on the PATH",
            hint="run this where Slurm's commands are (a login node), or leave --on slurm out",
        ) from error
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split()) or f"exit code {error.returncode}"
        raise StokerError(f"{command[0]} failed: {said}", hint=_HINTS[command[0]]) from error


_HINTS = {
    "sbatch": "give what your cluster asks for, as --sbatch=--account=NAME --sbatch=--time=1:00:00",
    "squeue": "jobs already submitted go on; once `squeue` works here again, the same command finds them",
    "scontrol": "check that `scontrol show config` works here",
}
