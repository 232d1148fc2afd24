"""The command where its surroundings are not what they should be: other locales, full disks, closed pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

RUN = "import sys; from stoker.cli import main; main(sys.argv[1:])"


def stoker(*arguments: str, stdout: int = subprocess.PIPE, **environment: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, *arguments],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env={**os.environ, **environment},
        timeout=60,
    )
    return done.returncode, (done.stdout or b"").decode("latin-1"), done.stderr.decode()


@pytest.mark.parametrize("at_once", ["", "1"])  # a file is written to at the end, unless one asks for more
@pytest.mark.parametrize("arguments", ["plan", "plan --json", "plan --help", "metrics dashboard"])
def test_a_full_disk_is_said_and_no_traceback(arguments: str, at_once: str) -> None:
    with open("/dev/full", "wb") as full:
        code, _, said = stoker(*arguments.split(), stdout=full.fileno(), PYTHONUNBUFFERED=at_once)
    assert (code, said.splitlines()[0]) == (1, "error: No space left on device")
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("closed", "code"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0), ("--nodes x 2>/dev/full", 2)]
)
def test_an_output_that_is_closed_or_full_changes_no_exit_code(closed: str, code: int) -> None:
    line = f'"{sys.executable}" -m stoker.cli plan {closed}'
    assert subprocess.run(["sh", "-c", line], stdout=subprocess.DEVNULL).returncode == code


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    page = tmp_path / "missing" / "plan.html"
    code, _, said = stoker("plan", "--html", str(page))
    assert (code, said) == (1, f"error: {page}: No such file or directory\n")


def test_letters_that_a_locale_lacks_are_replaced() -> None:
    code, said, _ = stoker("plan", "--name", "a→b", PYTHONIOENCODING="latin-1")
    assert code == 0
    assert said.startswith("a?b: 1 node x")


def test_json_is_whole_in_any_locale() -> None:
    code, said, _ = stoker("plan", "--json", "--name", "a→b", PYTHONIOENCODING="latin-1")
    assert code == 0
    assert json.loads(said)["job"]["name"] == "a→b"


def test_the_first_process_of_a_container_ends_when_told() -> None:
    alone = f"import os; os.getpid = lambda: 1\n{RUN}"
    process = subprocess.Popen(
        [sys.executable, "-c", alone, "doctor", "--metrics", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        env={**os.environ, "STOKER_TOKEN": "t"},
    )
    assert process.stderr
    with process.stderr:
        assert b"machine: " in process.stderr.readline()
        process.terminate()
        assert (
            process.wait(30) == 143
        )  # by its own handler: the kernel would say -15, and to process 1 nothing
