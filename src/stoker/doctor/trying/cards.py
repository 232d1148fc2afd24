"""Card trial: a process for each card copies to it, and all of them do one all-reduce; bounded in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from importlib.util import find_spec

from stoker.machine.plain import Unknown, from_plain
from stoker.machine.trials import RankTrial
from stoker.processes import undisturbed

_MOST_S = 60.0  # to load torch on a cold disk takes ten, to start CUDA on eight cards as long again


def try_cards(count: int, *, environ: Mapping[str, str] = os.environ) -> tuple[RankTrial, ...] | Unknown:
    """Each of the cards, or two processes on the CPU where there is none."""
    if find_spec("torch") is None:
        return Unknown(reason="torch is not installed")
    ranks, started = count or 2, list[subprocess.Popen[str]]()
    own = {"GLOO_SOCKET_IFNAME": "lo"} if not count else {}  # ranks of one machine meet on it
    with ExitStack() as stack:
        with undisturbed():
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stoker-try-"))
            for rank in range(ranks):
                words = [f"{__package__}.rank", folder, str(rank), str(ranks)]
                started.append(_started(words, {"OMP_NUM_THREADS": "1", **own, **environ}))
                stack.callback(_ended, started[-1])
        deadline = time.monotonic() + _MOST_S
        return tuple(_answer(rank, one, deadline) for rank, one in enumerate(started))


def _started(words: list[str], environ: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _ended(process: subprocess.Popen[str]) -> None:
    """Also on Ctrl-C, and for a rank that waits for one that is gone."""
    process.kill()
    process.communicate()


def _answer(rank: int, process: subprocess.Popen[str], deadline: float) -> RankTrial:
    try:
        said, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return RankTrial(rank=rank, error=f"no answer in {_MOST_S:g} s")
    try:
        return from_plain(RankTrial, json.loads(said.splitlines()[-1]))
    except (ValueError, IndexError):
        return RankTrial(rank=rank, error=f"ended with {process.returncode} and no answer")
