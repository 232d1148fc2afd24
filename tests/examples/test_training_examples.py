"""The examples run, and those that keep checkpoints go on where they were."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "load"))

from small_datasets import make_tokens  # noqa: E402 - the path to it is set just above

pytestmark = pytest.mark.integration


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(5)
    return make_tokens(tmp_path / "corpus", [rng.integers(20, 900, n).tolist() for n in (60, 9, 40)])


def start(name, *arguments):
    command = [sys.executable, ROOT / "examples" / name / "train.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(list(map(str, command)), text=True, env=environment, **pipes)


def last_line(process):
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    return out.splitlines()[-1]


def run(name, *arguments):
    return last_line(start(name, *arguments))


@pytest.fixture
def needs(skip_or_fail):
    def check(package):
        if importlib.util.find_spec(package) is None:
            skip_or_fail(f"{package} is not installed: `make venv` brings it")

    return check


def test_a_plain_loop_trains_and_resumes(corpus, tmp_path):
    state = tmp_path / "run"
    assert run("plain_loop", corpus, "--steps", 6, "--checkpoint", state).startswith("step 6")
    assert run("plain_loop", corpus, "--steps", 12, "--checkpoint", state).startswith("step 12")


def test_lightning_trains_and_resumes_at_its_position(corpus, needs, tmp_path):
    needs("lightning")
    assert run("lightning", corpus, "--steps", 6, "--output", tmp_path) == "step 6, position 48"
    assert run("lightning", corpus, "--steps", 12, "--output", tmp_path) == "step 12, position 96"


LEAVERS = {
    "plain_loop": "--checkpoint",
    "accelerate": "--checkpoint",
    "hf_trainer": "--output",
    "lightning": "--output",
}


@pytest.mark.parametrize("name", LEAVERS)
def test_an_example_leaves_when_it_is_told_to_and_goes_on_from_there(name, corpus, needs, tmp_path):
    needs({"hf_trainer": "transformers", "plain_loop": "torch"}.get(name, name))
    arguments = (corpus, LEAVERS[name], tmp_path / "out")
    process = start(name, *arguments, "--steps", 1_000_000)
    wait_for_handler(process.pid)
    process.send_signal(signal.SIGUSR1)
    left_at = int(last_line(process).split()[1].rstrip(","))
    assert 1 <= left_at < 1_000_000
    assert run(name, *arguments, "--steps", left_at + 2).startswith(f"step {left_at + 2}")


def wait_for_handler(pid):
    """Until the program has said what to do on SIGUSR1: before that the signal would end it."""
    deadline = time.monotonic() + 120
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        caught = int(status.partition("SigCgt:")[2].split()[0], 16)
        if caught >> (signal.SIGUSR1 - 1) & 1:
            return
        assert time.monotonic() < deadline
        time.sleep(0.02)
