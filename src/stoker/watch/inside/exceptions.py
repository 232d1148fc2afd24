"""Exceptions that end a process or its loader, as events: type and text, cause, the user's line.

A loader whose worker was killed dies of what it happened to do then (EOFError, ConnectionResetError): the
worker's own exit says what happened. A launcher dies because a rank did: its exception tells which.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stoker.redact import HIDDEN, is_secret, redact_text
from stoker.watch.inside.frames import is_library, top_user_frame

if TYPE_CHECKING:
    from stoker.watch.inside.probe import Probe

_TEXT = 2000
_CHAIN = 8
_PATIENCE_S = 0.5
_WORKER = re.compile(r"killed by signal: ([A-Za-z ]+)")
_SPAWNED = re.compile(r"process (\d+) terminated with (?:signal (SIG[A-Z]+)|exit code (\d+))", re.IGNORECASE)
_ELASTIC = re.compile(r"Root Cause.*?rank\s*:\s*(\d+).*?exitcode\s*:\s*(-?\d+)", re.DOTALL)
_IN_CHILD = re.compile(
    r"Process (\d+) terminated with the following error|Caught \w+ in DataLoader worker process (\d+)"
)
_TRACED = re.compile(r'^  File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_SETTING = re.compile(r"(-{2}[\w-]+|[A-Za-z_][\w-]*(?=['\"]?\s*[=:]))(['\"]?[\s=:,]+['\"]?)([^\s'\",\]]{6,})")
_NAMED = re.compile(r"\b(SIG[A-Z]{2,5})\b|exitcode\s*:\s*-(\d+)|got signal: (\d+)")


def say_exit(probe: Probe, status: Any) -> None:
    """`sys.exit` with a code that is not 0: of the exception that is being handled, or for a reason given."""
    error = sys.exc_info()[1]
    if error is not None and not isinstance(error, SystemExit):
        say_exception(probe, error)
    elif isinstance(status, str):
        say_exception(probe, SystemExit(status))


def say_exception(probe: Probe, error: BaseException, *, workers: Any = (), in_thread: bool = False) -> None:
    """Tell the run of it. `workers` are a loader's processes, some of which may have died; one `in_thread`
    ended the loop's own thread, and not the process."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (OSError, EOFError)) and (told := _wait_for_any(workers)):
        text = f"{told} Then {text}"
    facts: dict[str, Any] = {"pid": os.getpid(), **_of_text(text), **_of_workers(workers)}
    if facts.pop("worker", False) and "DataLoader worker" not in text:
        text = f"DataLoader worker was killed by {facts['signal']}; then {text}"
    chain = [_quiet(f"{type(one).__name__}: {one}")[:_TEXT] for one in _chain(error)]
    where = _of_worker(str(error)) or _where(error)
    probe.events.say(
        "exception",
        _quiet(_root(text))[:_TEXT],
        **facts,
        **({"chain": chain} if chain else {}),
        **({"where": where} if where else {}),
        **({"in_thread": True} if in_thread else {}),
    )


def _quiet(text: str) -> str:
    """Without what options and settings of secret names are set to; URLs are seen to where it is written."""
    known = redact_text(text)  # first: `Authorization: Bearer X` must not lose the word and keep the key
    return _SETTING.sub(lambda one: f"{one[1]}{one[2]}{HIDDEN}" if _names_secret(one[1]) else one[0], known)


def _names_secret(name: str) -> bool:
    """A `KeyError` says which key, and that is a name."""
    return is_secret(name) and not name.endswith("Error")


def _of_text(text: str) -> dict[str, Any]:
    """The signal and the rank that the words of torch and of its launchers name."""
    if found := _ELASTIC.search(text):
        rank, code = int(found[1]), int(found[2])
        return {"rank": rank, **({"signal": str(-code)} if code < 0 else {})}
    if found := _SPAWNED.search(text):
        return {"rank": int(found[1]), **({"signal": found[2]} if found[2] else {})}
    if found := _WORKER.search(text):
        return {"signal": found[1].strip()}
    found = _NAMED.search(text)
    return {"signal": next(filter(None, found.groups()))} if found else {}


def _wait_for_any(workers: Any) -> str:
    """A loader that lost its connection knows it before the kernel is done with the worker that died. When it
    is, torch's handler of SIGCHLD may raise what it knows, here as well as anywhere."""
    until = time.monotonic() + _PATIENCE_S
    try:
        while workers and time.monotonic() < until and all(one.exitcode is None for one in workers):
            time.sleep(0.01)
    except RuntimeError as told:
        return str(told)
    return ""


def _of_workers(workers: Any) -> dict[str, Any]:
    """The signal that ended one of a loader's processes, if one did."""
    for worker in workers or ():
        code = getattr(worker, "exitcode", None)
        if isinstance(code, int) and code < 0 and code != -signal.SIGTERM:
            return {"signal": signal.Signals(-code).name, "worker": True}
    return {}


def _root(text: str) -> str:
    """torch puts the traceback of a child into its own exception: what begins its last line says it."""
    if found := _IN_CHILD.search(text):
        who = f"process {found[1]}" if found[1] else f"loader worker {found[2]}"
        return f"{_last_words(text)} (in {who})"
    return text


def _last_words(text: str) -> str:
    """Of a traceback: type and text of its exception, which may have several lines."""
    lines = text.rstrip().splitlines()
    after = max((i for i, line in enumerate(lines) if _TRACED.match(line)), default=-1) + 1
    said = [i for i, line in enumerate(lines[after:], after) if line and not line.startswith(" ")]
    return "\n".join(lines[said[0] :] if said else lines[-1:]).strip()


def _of_worker(text: str) -> str:
    """The user's line that an exception of a loader's worker came from, by the traceback in its text."""
    if not text.startswith("Caught "):
        return ""
    frames = [f"{found[1]}:{found[2]} {found[3]}" for found in _TRACED.finditer(text)]
    return top_user_frame(frames) if frames else ""


def _chain(error: BaseException) -> list[BaseException]:
    """What it came from, the cause first: as Python shows it under "direct cause" and "during handling"."""
    found: list[BaseException] = []
    one = error
    while len(found) < _CHAIN:
        before = one.__cause__ or (None if one.__suppress_context__ else one.__context__)
        if before is None or before in found or before is error:
            break
        found.append(before)
        one = before
    return found


def _where(error: BaseException) -> str:
    """The innermost line of the user's program that it went through; where it has not come as far yet, the
    one that it is on its way to."""
    with suppress(Exception):
        trace = error.__traceback__
        around = traceback.extract_stack(trace.tb_frame.f_back if trace else sys._getframe(1))
        places = [*around, *traceback.extract_tb(trace)]
        theirs = [one for one in places if os.path.dirname(one.filename) != os.path.dirname(__file__)]
        where = top_user_frame([f"{one.filename}:{one.lineno} {one.name}" for one in theirs])
        return "" if is_library(where) else where
    return ""
