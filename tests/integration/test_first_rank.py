"""first_rank between real processes: one works, all get its answer, whatever becomes of it."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest
from clusters import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.integration

SIZE = 4
PROGRAM = """
import json, os, signal, sys, time
signal.alarm(60)  # whatever goes wrong, nothing hangs
from pathlib import Path
import stoker

RANK, HERE = int(os.environ["RANK"]), Path(os.environ["HERE"])

def note(text):
    with (HERE / "notes").open("a") as file:
        file.write(f"{text}\\n")

def wait_for(name):
    while not (HERE / name).exists():
        time.sleep(0.01)

class Odd(Exception):
    def __init__(self, a, b):
        super().__init__("odd")

def told(block):
    try:
        return {"result": block()}
    except Exception as error:
        return {"kind": type(error).__name__, "message": str(error), "cause": str(error.__cause__)}

"""


SAY = """
print(json.dumps(told(block)), flush=True)
sys.stdin.read()  # stays until the test lets it go
"""


class Job:
    """Starts ranks of a job; each prints what its block gave, as JSON."""

    def __init__(self, here: Path, environ: Callable[..., dict[str, str]], stack: ExitStack) -> None:
        self.here, self._environ, self._stack = here, environ, stack

    def start(
        self, rank: int, body: str, *, size: int = SIZE, port: int = 29500, host: str = ""
    ) -> subprocess.Popen[str]:
        environ = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "HERE": self.here, "TMPDIR": self.here}
        process = subprocess.Popen(
            [*_on(host), sys.executable, "-c", f"{PROGRAM}{body}{SAY}"],
            env=self._environ(**{name: str(value) for name, value in environ.items()}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._stack.enter_context(process)
        self._stack.callback(process.kill)
        return process

    def run(self, body: str, *, size: int = SIZE, port: int = 29500) -> list[dict[str, str]]:
        """What each rank said. As in a real job, none ends before another has started."""
        processes = [self.start(rank, body, size=size, port=port) for rank in range(size)]
        lines = [process.stdout.readline() for process in processes if process.stdout]
        assert [process.communicate(timeout=60)[0] for process in processes] == [""] * size
        return [json.loads(line) for line in lines]

    def notes(self) -> list[str]:
        path = self.here / "notes"
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def left(self) -> list[str]:
        return [path.name for path in self.here.glob("stoker-*/first/*")]


def _on(host: str) -> list[str]:
    """What runs a program where the machine has this name: nothing can be proven of it elsewhere."""
    return ["unshare", "--uts", "sh", "-c", f'hostname {host}; exec "$@"', "sh"] if host else []


def said(process: subprocess.Popen[str]) -> dict[str, str]:
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    answer: dict[str, str] = json.loads(out)
    return answer


@pytest.fixture
def job(tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(tmp_path, stoker_environ, stack)


# The worker tells its process id, and its result says who it was.
WORK = """
def block():
    with stoker.first_rank("work") as first:
        if first:
            note(os.getpid())
            first.result = f"by {os.getpid()}"
    return first.result
"""


def test_one_works_and_all_have_its_result(job: Job) -> None:
    answers = job.run(WORK)
    (worker,) = job.notes()
    assert answers == [{"result": f"by {worker}"}] * SIZE
    assert job.left() == []


def test_the_same_name_again_is_another_meeting(job: Job) -> None:
    body = """
def block():
    results = []
    for number in range(5):
        with stoker.first_rank("work") as first:
            if first:
                note(number)
                first.result = [number, os.getpid()]
        results.append(first.result)
    return results
"""
    answers = job.run(body)
    assert job.notes() == list("01234")
    assert answers == [answers[0]] * SIZE
    assert [number for number, _ in answers[0]["result"]] == list(range(5))
    assert job.left() == []


def test_two_jobs_on_a_node_do_not_meet(job: Job) -> None:
    one, other = job.run(WORK, size=2, port=1), job.run(WORK, size=2, port=2)
    assert len(job.notes()) == 2
    assert one != other


def test_an_exception_reaches_everyone_as_it_was(job: Job) -> None:
    body = """
def block():
    with stoker.first_rank("work") as first:
        if first:
            note(RANK)
            raise stoker.errors.StorageError("no such bucket", hint="make one")
"""
    answers = job.run("import stoker.errors\n" + body)
    (rank,) = job.notes()
    for answer in answers:
        assert (answer["kind"], answer["message"]) == ("StorageError", "no such bucket\nhint: make one")
    others = [answer for number, answer in enumerate(answers) if str(number) != rank]
    assert all(f"rank {rank}, process" in answer["cause"] for answer in others)
    assert job.left() == []


def test_an_exception_that_cannot_be_made_again_is_described(job: Job) -> None:
    body = """
def block():
    with stoker.first_rank("work") as first:
        if first:
            note(RANK)
            raise Odd(1, 2)
"""
    answers = job.run(body)
    (rank,) = job.notes()
    kinds = [answer["kind"] for answer in answers]
    assert kinds.pop(int(rank)) == "Odd"
    assert kinds == ["FirstRankError"] * (SIZE - 1)
    assert all("Odd" in answer["message"] for answer in answers if answer["kind"] == "FirstRankError")


def test_a_result_that_is_no_json_fails_everywhere(job: Job) -> None:
    body = """
def block():
    with stoker.first_rank("work") as first:
        if first:
            first.result = Path("/data")
"""
    assert {answer["kind"] for answer in job.run(body)} == {"UsageError"}


def test_another_takes_over_from_a_killed_worker(job: Job) -> None:
    body = """
def block():
    with stoker.first_rank("work") as first:
        if first:
            note(RANK)
            if len((HERE / "notes").read_text().split()) < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            first.result = RANK
    return first.result
"""
    processes = [job.start(rank, body) for rank in range(SIZE)]
    lines = [process.stdout.readline() for process in processes if process.stdout]
    for process in processes:
        process.communicate(timeout=60)
    *killed, worker = map(int, job.notes())
    assert len(killed) == 2
    for rank, process in enumerate(processes):
        assert process.returncode == (-signal.SIGKILL if rank in killed else 0)
    assert [json.loads(line) for line in lines if line] == [{"result": worker}] * (SIZE - 2)


BUSY = """
def block():
    with stoker.first_rank("work", ttl_s=0.2, **MORE) as first:
        if first:
            note(f"{RANK} {os.getpid()}")
            HOLD
            note("done")
            first.result = RANK
    return first.result
"""
STOP = "os.kill(os.getpid(), signal.SIGSTOP)"
# a C call that keeps Python's lock, for as long as it takes another process to let it go
LOCK = """import ctypes
            while not (HERE / "enough").exists(): ctypes.PyDLL(None).usleep(1_500_000)"""
SHARED = '{"per": "job", "folder": os.environ["HERE"]}'


@pytest.mark.usefixtures("need_root")
@pytest.mark.parametrize("hold", [STOP, LOCK], ids=["stopped", "in a call that keeps the lock"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_a_worker_that_lives_is_never_overtaken(job: Job, hold: str, nodes: int) -> None:
    body = BUSY.replace("HOLD", hold).replace("**MORE", f"**{SHARED}" if nodes == 2 else "")
    processes = [job.start(rank, body, size=2, host=f"node-{rank % nodes}") for rank in range(2)]
    wait_until(lambda: len(job.notes()) == 1, "one works")
    rank, pid = map(int, job.notes()[0].split())
    looked = set()  # the other one looks at the folder, some times in each TTL, and touches it
    (folder,) = [path for path in job.here.rglob("*work-0") if path.is_dir()]
    wait_until(lambda: looked.add(folder.stat().st_mtime_ns) or len(looked) > 60, "the other one has looked")
    assert len(job.notes()) == 1
    (job.here / "enough").touch()
    os.kill(pid, signal.SIGCONT)
    assert [said(process) for process in processes] == [{"result": rank}] * 2
    assert job.notes()[1:] == ["done"]


@pytest.mark.usefixtures("need_root")
def test_another_node_takes_over_from_a_killed_worker(job: Job) -> None:
    body = BUSY.replace("HOLD", "len(job_notes()) > 1 or os.kill(os.getpid(), signal.SIGKILL)")
    body = body.replace("**MORE", f"**{SHARED}")
    body = 'job_notes = lambda: (HERE / "notes").read_text().splitlines()\n' + body
    processes = [job.start(rank, body, size=2, host=f"node-{rank}") for rank in range(2)]
    wait_until(lambda: len(job.notes()) == 3, "another has worked")
    killed, worker = (int(note.split()[0]) for note in job.notes()[:2])
    assert said(processes[worker]) == {"result": worker}
    assert processes[killed].wait(60) == -signal.SIGKILL


@pytest.mark.usefixtures("need_root")
def test_what_another_user_answers_is_not_read(job: Job) -> None:
    """An answer carries a pickle: whoever can write to the folder would run what they like."""
    body = BUSY.replace("HOLD", 'wait_for("enough")').replace("**MORE", f"**{SHARED}")
    processes = [job.start(rank, body, size=2) for rank in range(2)]
    wait_until(lambda: len(job.notes()) == 1, "one works")
    (seat,) = job.here.rglob("seat-*")
    answer = seat.parents[1] / f"{seat.name.rpartition('-')[2]}.answer"
    evil = base64.b64encode(b"cos\nsystem\n(S'touch %s/owned'\ntR." % str(job.here).encode()).decode()
    forged = {"id": "x", "result": 7, "who": "?", "at_s": 1e12, "clock": "", "error": evil, "report": "!"}
    answer.write_text(json.dumps({**forged, "token": answer.stem}))
    os.chown(answer, 12345, 12345)
    looked = set()
    wait_until(lambda: looked.add(answer.parent.stat().st_mtime_ns) or len(looked) > 20, "it was looked at")
    assert not (job.here / "owned").exists()
    answer.unlink()
    (job.here / "enough").touch()
    rank = int(job.notes()[0].split()[0])
    assert [said(process) for process in processes] == [{"result": rank}] * 2


def test_a_late_rank_gets_the_answer_of_a_living_worker(job: Job) -> None:
    body = (
        WORK
        + """
work = block
def block():
    result = work()
    if RANK == 0:
        (HERE / "answered").touch()
        wait_for("late")
    return result
"""
    )
    early = job.start(0, body, size=2)
    wait_until((job.here / "answered").exists, "there is an answer")
    late = said(job.start(1, body, size=2))
    (job.here / "late").touch()
    assert late == said(early)
    assert len(job.notes()) == 1
    assert job.left() == []


def test_a_restarted_job_does_not_take_an_old_answer(job: Job) -> None:
    """The first life ends after the answer, before everyone has it; the second has the same name."""
    first = said(job.start(0, WORK, size=2))
    assert len(job.left()) == 1
    answers = job.run(WORK, size=2)
    assert answers[0] == answers[1] != first
    assert len(job.notes()) == 2
    assert job.left() == []


def test_a_named_run_meets_without_a_launcher(job: Job) -> None:
    body = WORK.replace('"work"', '"work", run="tuesday", folder=HERE / "meet"')
    alone = "for name in ('RANK', 'WORLD_SIZE'): del os.environ[name]\n"
    answers = job.run(alone + body, size=3)
    (worker,) = job.notes()
    assert answers == [{"result": f"by {worker}"}] * 3


def test_a_restart_by_torchrun_is_another_job(
    job: Job, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    script = job.here / "script.py"
    script.write_text(
        PROGRAM
        + """
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
with stoker.first_rank("work") as first:
    if first:
        note(life)
        first.result = life
assert first.result == life
sys.exit(life == "0")
"""
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, "--max-restarts", "1", "--monitor-interval", "0.1", str(script)],
        env=stoker_environ(HERE=str(job.here), TMPDIR=str(job.here)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert job.notes() == ["0", "1"]


def test_ctrl_c_lets_another_work(job: Job) -> None:
    body = """
def block():
    with stoker.first_rank("work") as first:
        if first:
            note(RANK)
            if len((HERE / "notes").read_text().split()) == 1:
                raise KeyboardInterrupt
            first.result = RANK
    return first.result
try:
    print(json.dumps(told(block)))
finally:
    sys.stdout.flush()
    os._exit(0)
"""
    processes = [job.start(rank, body, size=2) for rank in range(2)]
    outs = [process.communicate(timeout=60)[0] for process in processes]
    interrupted, worker = map(int, job.notes())
    assert outs[interrupted] == ""
    assert json.loads(outs[worker]) == {"result": worker}
