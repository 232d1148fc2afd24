"""Measuring processes: those with torch are not ours, so a command loads none, nor hangs where a driver does.

A process is started as `python -m stoker.bench.card.NAME`, is told its job as JSON on its standard input, and
prints lines of JSON: what it is about to measure, and at the end its answer or its error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from typing import Any

from stoker.errors import MissingPackageError, StokerError, UsageError, pip_line
from stoker.machine.cards import read_cards
from stoker.machine.files import Files
from stoker.processes import undisturbed
from stoker.redact import redact_text

Said = Callable[[str, int, int], None]
_START_S = 120.0  # to load torch from a cold disk and to start CUDA on eight cards
_TEXT = 300


def ask(
    name: str, job: Mapping[str, Any], *, seconds: float, said: Said, descriptors: Sequence[int] = ()
) -> dict[str, Any]:
    """The answer of one process, which has so many seconds beside its start."""
    with ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
        with undisturbed():
            process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.{name}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                pass_fds=tuple(descriptors),
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                text=True,
            )
            stack.callback(_ended, process)
        late = threading.Timer(_START_S + seconds, process.kill)
        stack.callback(late.cancel)
        late.start()
        answer = _answer(process, job, said)
        if answer is None:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["it said nothing"])[-1]
            raise StokerError(
                f"the measuring process ended with {process.wait()}: {redact_text(last)[:_TEXT]}",
                hint="`stoker doctor` looks at cards, driver and torch",
            )
    if "error" in answer:
        raise (UsageError if answer["usage"] else StokerError)(answer["error"], hint=answer["hint"])
    return answer


def check_device(device: str) -> None:
    """Refuse what cannot be, before anything is measured and as far as it is known without torch."""
    if find_spec("torch") is None:
        raise MissingPackageError("torch is not installed", hint=pip_line("torch", extra="torch"))
    if not device.startswith("cuda"):
        return
    cards, stack = read_cards(Files(), os.environ)
    if cards == () or stack.torch_cuda is None:
        why = "this machine has no card" if cards == () else "torch was built without CUDA"
        raise UsageError(why, hint="`stoker doctor` looks at cards; `--device cpu` measures memory alone")


def answer_with(measure: Callable[[dict[str, Any], Said], dict[str, Any]]) -> None:
    """The other side: what a measuring process does with its job."""

    def said(name: str, done: int, of: int) -> None:
        print(json.dumps({"said": [name, done, of]}), flush=True)

    try:
        found = measure(json.loads(sys.stdin.readline()), said)
    except StokerError as error:
        found = {"error": error.message, "hint": error.hint, "usage": isinstance(error, UsageError)}
    print(json.dumps({"answer": found}), flush=True)


def _answer(process: subprocess.Popen[str], job: Mapping[str, Any], said: Said) -> dict[str, Any] | None:
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    for line in process.stdout:
        if not line.startswith("{"):
            continue  # what a library prints
        told = json.loads(line)
        if "answer" in told:
            return dict(told["answer"])
        said(*told["said"])
    return None


def _ended(process: subprocess.Popen[str]) -> None:
    """Also on Ctrl-C."""
    process.kill()
    process.communicate()
