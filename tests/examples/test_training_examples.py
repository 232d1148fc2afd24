"""The examples run, and those that keep checkpoints go on where they were."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stoker.cli import run as stoker_command

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts, tokenizer_path, write_jsonl):
    folder = tmp_path_factory.mktemp("prepared")
    source, out = write_jsonl(folder / "texts.jsonl", texts), folder / "corpus"
    options = ("--tokenizer", tokenizer_path, "--out", out, "--work", folder / "work")
    assert stoker_command([str(one) for one in ("prepare", source, *options)]) == 0
    return out


# what torchrun would say to the only rank of a job; port 0: the store takes one that is free
ONE_RANK = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
}
LAUNCHED = ("preemptible", "deepspeed", "megatron")  # they ask for a launcher's variables
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
BY = {  # what stands between python and the script
    "fsdp2": lambda _: TORCHRUN,
    "watched_dataloader": lambda folder: (*WATCH, folder / "watched", "--", sys.executable),
}
WATCH = ("-m", "stoker.cli", "watch", "--gpu", "none", "--out")


def start(name, *arguments, at=None):
    before = BY[name](at) if name in BY else ()
    command = [sys.executable, *before, ROOT / "examples" / name / "train.py", *arguments]
    environment = {**os.environ, **(ONE_RANK if name in LAUNCHED else {}), "OMP_NUM_THREADS": "1"}
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


@pytest.mark.slow  # every example that is killed below goes on; this one also says where it is
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
PACKAGES = {
    "hf_trainer": "transformers",
    "accelerate": "accelerate",
    "lightning": "lightning",
    "jax": "jax",
    "megatron": "megatron",
}
KILLED = {**LEAVERS, "preemptible": "--checkpoints", "train_images": "--checkpoint"}
KILLED |= dict.fromkeys(("watched_dataloader", "fsdp2", "deepspeed", "megatron", "jax"), "--checkpoint")
EVERY = 20  # steps between checkpoints
_STEP = re.compile(r"step (\d+), loss (\S+)$", re.MULTILINE)


@pytest.mark.parametrize("name", LEAVERS)
def test_an_example_leaves_when_it_is_told_to_and_goes_on_from_there(name, corpus, needs, tmp_path):
    needs(PACKAGES.get(name, "torch"))
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


# --- kill -9 ---


# Their loop is that of plain_loop, and their start takes long; tests/integration/checkpoint/test_trainers.py
# kills the Trainer and Lightning each time.
LONG = ("deepspeed", "megatron", "fsdp2", "jax", "hf_trainer", "lightning")
NIGHTLY = [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in KILLED]


@pytest.mark.parametrize("name", NIGHTLY)
def test_an_example_killed_with_9_goes_on_bit_for_bit(name, corpus, needs, tmp_path):
    needs(PACKAGES.get(name, "torch"))
    data = tmp_path / "images" if name == "train_images" else corpus  # which it makes itself
    arguments = (data, KILLED[name], tmp_path / "out", "--every", EVERY)
    before = losses_until_killed(
        start(name, *arguments, "--steps", 1_000_000, at=tmp_path / "first"), tmp_path / "out"
    )
    process = start(name, *arguments, "--steps", max(before) + 3, at=tmp_path / "second")
    out, errors = process.communicate(timeout=240)
    assert process.returncode == 0, errors[-3000:]
    after = losses(out)
    assert list(after) == list(range(min(after), max(before) + 4))
    assert (min(after) - 1) % EVERY == 0
    assert min(after) > 1  # it went on, and did not begin anew
    again = before.keys() & after.keys()
    assert again
    assert {step: after[step] for step in again} == {step: before[step] for step in again}


def losses(out):
    return {int(step): loss for step, loss in _STEP.findall(out)}


def losses_until_killed(process, folder):
    """The losses of a run that is killed between two checkpoints, once there is one to go on from."""
    said = []
    for line in itertools.islice(process.stdout, 2_000):  # a run that never saves is no reason to hang
        said.append(line)
        found = _STEP.search(line)
        if found and int(found[1]) % EVERY == EVERY // 2 and [*folder.rglob("checkpoint.json")]:
            break
    for pid in [process.pid, *descendants(process.pid)]:  # a launcher and its ranks, as a node that is lost
        os.kill(pid, signal.SIGKILL)
    rest, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors[-3000:]
    return losses("".join(said) + rest)


def descendants(pid):
    """What a process has started, and they: torchrun gives its ranks sessions of their own."""
    listed = Path(f"/proc/{pid}/task").glob("*/children")
    children = [int(child) for path in listed for child in path.read_text().split()]
    return children + [one for child in children for one in descendants(child)]
