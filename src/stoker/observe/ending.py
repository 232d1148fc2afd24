"""How a run ended, in one line: exit code or signal, and what is known of the cause."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

from stoker.runs.columns import read_events

_SIGNALS = {"Bus error": "SIGBUS", "Killed": "SIGKILL", "Segmentation fault": "SIGSEGV", "Aborted": "SIGABRT"}
_MOST = 300


def ending(status: int, *, folder: Path, pid: int, oom_kills: int) -> str:
    """`exit 0`, `exit 1: loader worker killed by SIGBUS`, `killed by SIGKILL: out of memory (cgroup)`."""
    plain = f"exit {status}" if status >= 0 else f"killed by {signal_name(-status)}"
    if not status:
        return plain
    cause = out_of_memory(oom_kills, pid) or _told(folder)
    return f"{plain}: {cause}" if cause else plain


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def out_of_memory(oom_kills: int, pid: int) -> str:
    if oom_kills > 0:
        return "out of memory (cgroup)"
    return "out of memory (machine)" if pid in _killed_for_memory() else ""


def _told(folder: Path) -> str:
    """What the processes said themselves: the first exception of the run, or a collective that hung."""
    events = [event for path in folder.glob("events-*.jsonl") for event in read_events(path, shift_s=0.0)]
    events.sort(key=lambda event: event.t)
    for event in events:
        if event.what == "exception":
            return _cause_of(event.text, str(event.facts.get("signal", "")))
    hung = [event for event in events if event.what == "hang" and event.facts.get("in_collective")]
    return f"hung in {hung[-1].facts.get('collective_op') or 'a collective'}" if hung else ""


def _cause_of(text: str, killed_by: str) -> str:
    name = _SIGNALS.get(killed_by, killed_by)
    if name.isdigit():
        name = signal_name(int(name))
    if "DataLoader worker" in text and name:
        return f"loader worker killed by {name}"
    if name:
        return f"a process killed by {name}"
    first = re.sub(r"\s+", " ", text)
    return first if len(first) <= _MOST else first[:_MOST] + " …"


def _killed_for_memory() -> set[int]:
    """Processes the kernel says it killed for memory; nothing where its log may not be read."""
    try:
        handle = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return set()
    found: set[int] = set()
    try:
        while True:
            try:
                line = os.read(handle, 8192).decode("utf-8", "replace")
            except BlockingIOError:
                return found
            except OSError:  # lines were overwritten while we read
                continue
            if match := re.search(r"Killed process (\d+)", line):
                found.add(int(match[1]))
    finally:
        os.close(handle)
