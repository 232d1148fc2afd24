"""The command where its surroundings are not what they should be: other locales, full disks, closed pipes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_a_full_disk_is_said_and_no_traceback() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        code, _, said = stoker("plan", stdout=full)
    finally:
        os.close(full)
    assert (code, said) == (1, "error: No space left on device\n")


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
