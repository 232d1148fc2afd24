"""Watching a program on a card: copies timed by events, no synchronisation added, NVML and GPM columns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import stoker
from stoker.recording import KINDS
from stoker.watch import runs

PROGRAM = Path(__file__).parent / "programs" / "copies.py"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One watched run, sampled ten times a second, and what the program printed."""
    folder = tmp_path_factory.mktemp("watched")
    source = Path(stoker.__file__).parents[1]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "stoker.cli",
            "watch",
            "--out",
            "run",
            "--hz",
            "10",
            "--",
            sys.executable,
            PROGRAM,
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(source)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return runs.read_recording(folder / "run"), done.stdout


def total(rank, kind):
    mine = rank.spans.kind == KINDS.index(kind)
    return (rank.spans.end - rank.spans.start)[mine], rank.spans.bytes[mine]


def test_pinned_copies_last_as_long_as_the_card_copied(run):
    recording, _ = run
    seconds, moved = total(recording.ranks[0], "h2d")
    large = moved >= 64 << 20
    assert large.sum() >= 20
    rate = moved[large] / seconds[large]
    assert 5e9 < np.median(rate) < 200e9, "a host that only enqueues would seem far faster"


def test_waits_of_the_host_are_seen(run):
    seconds, _ = total(run[0].ranks[0], "sync")
    assert len(seconds) >= 20


def test_no_synchronisation_is_added(run):
    """The program runs a part of itself where torch raises at any synchronisation."""
    assert "no sync" in run[1]
    assert [event for event in run[0].ranks[0].events if event.what == "hook off"] == []


def test_compiled_and_captured_code_runs_as_it_would(run):
    assert "compiled" in run[1]
    assert "captured" in run[1]


def test_the_card_is_sampled_with_its_activity(run):
    (card, *_) = run[0].gpus
    assert card.memory_bytes > 1 << 30
    assert {"util", "power_w", "temp_c", "sm_mhz", "event_reasons", "fb_used"} <= set(card.samples.columns)
    assert {"sm_util", "any_tensor_util", "dram_bw_util"} <= set(card.samples.columns)
    assert card.samples.columns["sm_util"].max() <= 100
    assert run[0].ranks[0].gpu == card.index


def test_the_allocator_is_sampled(run):
    assert run[0].ranks[0].memory.columns["reserved"].max() > 0
