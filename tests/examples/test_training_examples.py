"""The examples run, and those that keep checkpoints go on where they were."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT / "tests" / "load"))

from small_datasets import make_tokens  # noqa: E402 - the path to it is set just above

pytestmark = pytest.mark.integration

pytestmark = pytest.mark.integration


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(5)
    return make_tokens(tmp_path / "corpus", [rng.integers(20, 900, n).tolist() for n in (60, 9, 40)])


def run(name, *arguments):
    command = [sys.executable, ROOT / "examples" / name / "train.py", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    text = list(map(str, command))
    done = subprocess.run(text, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.fixture
def needs(skip_or_fail):
    def check(package):
        if importlib.util.find_spec(package) is None:
            skip_or_fail(f"{package} is not installed")

    return check


def test_a_plain_loop_trains_and_resumes(corpus, tmp_path):
    state = tmp_path / "run"
    assert run("plain_loop", corpus, "--steps", 6, "--checkpoint", state).startswith("step 6")
    assert run("plain_loop", corpus, "--steps", 12, "--checkpoint", state).startswith("step 12")


def test_accelerate_trains(corpus, needs):
    needs("accelerate")
    assert run("accelerate", corpus, "--steps", 6).startswith("step 6")


def test_the_hugging_face_trainer_trains_and_resumes(corpus, needs, tmp_path):
    needs("transformers")
    assert run("hf_trainer", corpus, "--steps", 6, "--output", tmp_path / "out").startswith("step 6")
    assert run("hf_trainer", corpus, "--steps", 12, "--output", tmp_path / "out").startswith("step 12")


def test_lightning_trains_and_resumes_at_its_position(corpus, needs, tmp_path):
    needs("lightning")
    assert run("lightning", corpus, "--steps", 6, "--output", tmp_path) == "step 6, position 48"
    assert run("lightning", corpus, "--steps", 12, "--output", tmp_path) == "step 12, position 96"
