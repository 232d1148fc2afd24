"""`stoker watch` in a pipe: the program's output is its own, the verdict and the report come after it.

And `stoker report`: the page of a recording, as a file or served.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import pytest
from made_runs import TRACES

pytestmark = pytest.mark.integration

LOOP = """
import sys, time, pathlib
for number in range(8):
    print("batch", number, flush=True)
while len(sys.argv) > 1 and not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
sys.exit(7)
"""
ask_locally = build_opener(ProxyHandler({})).open


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    path = tmp_path / "loop.py"
    path.write_text(LOOP)
    return path


def test_the_card_follows_the_programs_own_output(
    run_stoker: Callable[..., Any], loop: Path, tmp_path: Path
) -> None:
    ran = run_stoker("watch", "--out", tmp_path / "run", "--price", 2.5, "--", sys.executable, loop)
    assert ran.rc == 7
    assert ran.stdout == "".join(f"batch {number}\n" for number in range(8))
    assert "\x1b" not in ran.stderr
    said = f"run     {tmp_path / 'run'}\nreport  {tmp_path / 'run' / 'report.html'}\n"
    assert ran.stderr.endswith(f"{said}history {tmp_path / '.stoker' / 'history.db'}\n")
    assert "exit 7" in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_page_and_metrics_can_be_read_while_it_runs(
    stoker_environ: Callable[..., dict[str, str]], loop: Path, tmp_path: Path
) -> None:
    done = tmp_path / "done"
    options = ["--out", tmp_path / "run", "--page", "0", "--metrics", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "watch", *options, "--", sys.executable, loop, done],
        env=stoker_environ(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr
    try:
        page, metrics = (process.stderr.readline().split()[-1] for _ in range(2))
        assert "stoker" in ask_locally(page, timeout=10).read().decode()
        _until(lambda: b"stoker_host_cores{" in ask_locally(metrics, timeout=10).read())
    finally:
        done.touch()
        process.communicate(timeout=60)
    assert process.returncode == 7


def test_a_recording_becomes_a_page(run_stoker: Callable[..., Any], tmp_path: Path) -> None:
    ran = run_stoker("report", TRACES / "starved_cpu.jsonl", "--out", tmp_path / "page.html", "--price", 2.5)
    assert (ran.rc, ran.stdout, ran.stderr) == (0, f"{tmp_path / 'page.html'}\n", "")
    assert "data starvation · cpu" in (tmp_path / "page.html").read_text("utf-8")


def test_a_page_is_served_until_it_is_stopped(stoker_environ: Callable[..., dict[str, str]]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "stoker.cli", "report", TRACES / "fed.jsonl", "--page", "0"],
        env=stoker_environ(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        url = process.stdout.readline().split()[2].rstrip(";")
        _until(lambda: b"healthy" in ask_locally(url, timeout=10).read())
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert process.returncode == 0


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
