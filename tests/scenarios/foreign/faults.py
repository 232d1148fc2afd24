"""What goes wrong in other people's training programs, as they write it. `FAULT` in the environment chooses
one; a program calls all of these where its tutorial has such a line, and each but the chosen does next to
nothing.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from typing import Any

import torch

FAULT = os.environ.get("FAULT", "")
AT = int(os.environ.get("FAULT_AT", "40"))  # the step of what happens once
_LEAST_S = 0.05


class Pauses:
    """A fault takes as long as the rest of the step does, whatever machine it runs on."""

    def __init__(self) -> None:
        self._ended = time.monotonic()

    def seconds(self) -> float:
        return min(max(_LEAST_S, time.monotonic() - self._ended), 1.0)

    def over(self) -> None:
        self._ended = time.monotonic()


PAUSES = Pauses()


def slow_decode(rows: int) -> None:
    """Reading and decoding, in a loop that makes its own batches."""
    if FAULT == "slow batch":
        time.sleep(PAUSES.seconds())
        PAUSES.over()


def tokenize(text: str) -> list[int]:
    """A tokenizer in Python."""
    ids = [ord(letter) % 251 for letter in text]
    if FAULT == "slow tokenising":
        until = time.monotonic() + PAUSES.seconds()
        while time.monotonic() < until:
            ids = [(one * 31 + 7) % 251 for one in ids]
        PAUSES.over()
    return ids


class RunLogger:
    """Sends every value to a server and waits for its answer."""

    def log(self, values: dict[str, float]) -> None:
        if FAULT == "blocking logger":
            self._send(values)

    def _send(self, values: dict[str, float]) -> None:
        time.sleep(PAUSES.seconds())
        PAUSES.over()


def gradient_stats(model: Any) -> dict[str, float]:
    """Norms of every parameter, one by one."""
    if FAULT != "per-parameter metrics":
        return {}
    found = {}
    until = time.monotonic() + PAUSES.seconds()
    while time.monotonic() < until:
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                found[name] = float(parameter.grad.norm()) / (float(parameter.data.norm()) + 1e-12)
    PAUSES.over()
    return found


def show_progress(step: int) -> None:
    if FAULT == "print flood":
        until = time.monotonic() + PAUSES.seconds()
        while time.monotonic() < until:
            print("step", step, "of many", "." * 200, file=sys.stderr, flush=True)
        PAUSES.over()


def collect_garbage() -> None:
    if FAULT == "gc":
        gc.collect()


def clutter() -> Any:
    """A heap that is long to walk."""
    if FAULT == "gc":
        return [{"a": [number]} for number in range(250_000)]
    return None


def start_background() -> None:
    """A thread that computes in Python: it holds the interpreter whenever it can."""
    if FAULT == "GIL thread":
        threading.Thread(target=_count_forever, name="monitor", daemon=True).start()


def _count_forever() -> None:
    total = 0
    while True:
        total = (total * 31 + 7) % 1_000_003


def evaluation_batches() -> int:
    return 40 if FAULT == "heavy evaluation" else 1


def slow_update(rate: float) -> float:
    """A learning rate that takes its time."""
    if FAULT == "slow optimizer":
        time.sleep(PAUSES.seconds())
        PAUSES.over()
    return rate


def trouble(step: int) -> None:
    """What ends a run."""
    if step != AT:
        return
    if FAULT == "crash":
        raise ValueError(f"loss is nan at step {step}")
    if FAULT == "SIGTERM":
        os.kill(os.getpid(), signal.SIGTERM)
    if FAULT == "rank SIGKILL" and int(os.environ.get("RANK_HERE", "1")) == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def clean_up() -> None:
    """What a program does when it ends, badly or not."""
    if FAULT in ("crash", "clean-up"):
        time.sleep(4)


def in_worker(index: int) -> None:
    """What kills a loader's worker."""
    if index >= AT and torch.utils.data.get_worker_info() is not None:
        if FAULT == "worker SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if FAULT == "worker SIGBUS":
            os.kill(os.getpid(), signal.SIGBUS)


def slow_sample() -> None:
    """A dataset that decodes what it is asked for."""
    if FAULT == "slow dataset":
        time.sleep(0.005)


def workers() -> int:
    """Loader processes, where the fault needs one."""
    return 1 if FAULT.startswith("worker") else 0


def here(rank: int) -> None:
    """Which rank this is, where the environment does not say."""
    os.environ["RANK_HERE"] = str(rank)
