"""kill -9 at random moments, then the same command again: the same bytes, and little done twice."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

MOMENTS = 10
RECIPE = Path(__file__).with_name("recipe.json")
OPTIONS = ["--shard-size", "1MiB", "--near-dedup", "0.8", "--workers", "2", "--curate", str(RECIPE)]
OPTIONS += ["--holdout", "validation=0.05"]


@pytest.fixture(scope="module")
def command(large_corpus: Path, tokenizer_path: Path, stoker_environ: Any) -> Callable[[Path], Any]:
    """Start `stoker prepare` as the leader of a session of its own."""

    def start(out: Path) -> subprocess.Popen[str]:
        arguments = [
            "prepare",
            str(large_corpus),
            "--tokenizer",
            str(tokenizer_path),
            "--out",
            str(out),
            *OPTIONS,
        ]
        return subprocess.Popen(
            [sys.executable, "-m", "stoker.cli", *arguments],
            env=stoker_environ(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start


@pytest.fixture(scope="module")
def undisturbed(
    command: Any, snapshot: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[dict[str, bytes], float]:
    """What a run makes that nobody disturbs, and how long it takes."""
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    started = time.monotonic()
    with command(out) as process:
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return snapshot(out), time.monotonic() - started


NIGHTLY = [
    pytest.param(tenth, marks=[] if tenth in (1, 4, 8) else [pytest.mark.slow]) for tenth in range(MOMENTS)
]


@pytest.fixture(params=NIGHTLY)
def moment(request: pytest.FixtureRequest, undisturbed: Any) -> float:
    """A random moment in each tenth of a run."""
    return undisturbed[1] * (request.param + random.random()) / MOMENTS


def session(leader: int) -> list[int]:
    """The processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended while we looked
            continue
        if int(fields[3]) == leader and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def workers(driver: int) -> Iterator[int]:
    for pid in session(driver):
        try:
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid
        except OSError:
            continue


def wait_until(condition: Callable[[], Any], *, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return value


def sleep_or_end(process: subprocess.Popen[str], seconds: float) -> None:
    """The moment is the point of this test: nothing else to wait for."""
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def markers(out: Path) -> dict[str, int]:
    """Finished tasks by stage."""
    counts: dict[str, int] = {}
    for path in out.glob(".stoker-*/done/*.json"):
        stage = path.name.partition("-")[0]
        counts[stage] = counts.get(stage, 0) + 1
    return counts


def finish(process: subprocess.Popen[str]) -> tuple[str, str]:
    with process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return output, errors


def test_a_killed_driver_is_made_good_by_the_same_command(
    moment: float, command: Any, undisturbed: Any, snapshot: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with command(out) as process:
        sleep_or_end(process, moment)
        process.kill()
        process.communicate()
    wait_until(lambda: not session(process.pid))  # its workers end with the task they are at
    # with its manifest a dataset is whole, and what its run had no time to clean up counts for nothing
    done = {} if (out / "manifest.json").exists() else markers(out)
    _, errors = finish(command(out))
    verbs = {"map": "tokenise", "match": "compare"}
    told = {verb: int(count) for verb, count in re.findall(r"(\w+): (\d+) of \d+ tasks? done before", errors)}
    assert told == {verbs.get(stage, stage): count for stage, count in done.items()}
    assert snapshot(out) == undisturbed[0]


@pytest.mark.parametrize("moment", [6], indirect=True)
def test_the_same_command_may_follow_at_once(
    moment: float, command: Any, undisturbed: Any, snapshot: Any, tmp_path: Path
) -> None:
    """The orphaned workers of the killed driver still run their last task."""
    out = tmp_path / "out"
    with command(out) as process:
        sleep_or_end(process, moment)
        process.kill()
        process.communicate()
    finish(command(out))
    wait_until(lambda: not session(process.pid))
    assert snapshot(out) == undisturbed[0]


def test_a_killed_worker_is_replaced(
    moment: float, command: Any, undisturbed: Any, snapshot: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = command(out)
    sleep_or_end(process, moment)
    wait_until(lambda: list(workers(process.pid)) or process.poll() is not None)
    for victim in list(workers(process.pid))[:1]:  # none where the run has just ended
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    finish(process)
    assert snapshot(out) == undisturbed[0]


def test_a_finished_run_leaves_nothing_hidden(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with command(out) as process:
        wait_until(lambda: markers(out).get("map"))
        process.kill()
        process.communicate()
    wait_until(lambda: not session(process.pid))
    finish(command(out))
    assert [path.name for path in out.rglob(".*")] == []


def test_an_interrupted_run_says_how_to_go_on(
    command: Any, undisturbed: Any, snapshot: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with command(out) as process:
        wait_until(lambda: [*workers(process.pid)])  # some of which have only just begun
        os.killpg(process.pid, signal.SIGINT)  # what a terminal does on Ctrl-C
        _, errors = process.communicate(timeout=60)
    wait_until(lambda: not session(process.pid))
    assert "Traceback" not in errors, errors
    assert process.returncode == 130
    assert errors.splitlines()[-2:] == [
        "error: interrupted",
        "hint: run the same command again: prepare and stage go on where they stopped",
    ]
    finish(command(out))
    assert snapshot(out) == undisturbed[0]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100))
def test_a_hundred_kills_leave_the_same_bytes(
    number: int, command: Any, undisturbed: Any, snapshot: Any, tmp_path: Path
) -> None:
    """Killed again and again, each time a little later, until a run gets to its end."""
    out, chooser = tmp_path / "out", random.Random(number)
    with command(out) as process:
        sleep_or_end(process, undisturbed[1] * chooser.random())
        process.kill()
        process.communicate()
    wait_until(lambda: not session(process.pid))
    finish(command(out))
    assert snapshot(out) == undisturbed[0]
    assert not list(out.glob(".*"))
