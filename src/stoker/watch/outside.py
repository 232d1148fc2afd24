"""Attach by process id, `stoker watch --pid`: a running job observed from outside.

No spans and no steps: what the machine, the cards and the processes' states show, and stacks where py-spy is
installed and permitted.
"""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.processes import environ_of, lives
from stoker.watch.command import Node, Options, begin_run, sampling
from stoker.watch.runs.files import VERSION, Clock, Events, process_key, write_meta
from stoker.world import World

_LOOK_S = 0.5
_LOOKS_PER_STACK = 20
_PATIENCE_S = 30
_MISSING = (
    "no spans and no steps: the process was observed from outside; start it with `stoker watch -- …` for them"
)


def watch_pid(pid: int, options: Options) -> int:
    """Observe until the process ends or we are interrupted; always 0: its exit code is not ours to know."""
    folder = Path("/proc", str(pid))
    if not folder.exists():
        raise UsageError(f"there is no process {pid}", hint="give the pid of a training process")
    command = (folder / "cmdline").read_bytes().split(b"\0")[:-1]
    argv = [word.decode("utf-8", "replace") for word in command]
    node = begin_run(options, argv=argv, title=f"pid {pid}")
    node.miss(_MISSING)
    stacks = _Stacks(pid, node, options.folder)
    with sampling(options, node, lambda: [pid]):
        ended = _until_it_ends(pid, stacks)
    node.end(ended)
    return 0


def _until_it_ends(pid: int, stacks: _Stacks) -> str:
    """`ended`, or `running` where we were interrupted first."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for look in itertools.count():
            if not lives(pid):
                break
            if look % _LOOKS_PER_STACK == 0:
                stacks.take()
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        return "running"
    finally:
        for number, action in before.items():
            signal.signal(number, action)

    return "ended"


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class _Stacks:
    """py-spy's view of the process; said once where there is none."""

    def __init__(self, pid: int, node: Node, folder: Path) -> None:
        self._pid, self._node = pid, node
        self._program = _find_py_spy()
        key = process_key(node.name, pid)
        self._events = Events(folder / f"events-{key}.jsonl")
        identity = {
            "version": VERSION,
            "key": key,
            "pid": pid,
            "node": node.name,
            "rank": _rank(pid),
            "began": time.time(),
        }
        write_meta(folder / f"proc-{key}.json", {**identity, "clock": Clock.here().as_dict()})
        if self._program is None:
            node.miss("no Python stacks: py-spy is not installed (pip install py-spy)")

    def take(self) -> None:
        if self._program is None:
            return
        command = [self._program, "dump", "--json", "--nonblocking", "--pid", str(self._pid)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S)
            frames = _main_frames(self._pid, json.loads(done.stdout or "[]"))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            self._give_up(f"py-spy: {type(error).__name__}")
            return
        if done.returncode and lives(self._pid):
            self._give_up((done.stderr.strip().splitlines() or ["py-spy failed"])[0])
        elif frames:
            self._events.say("stack", _top(frames), seconds=0.0, frames=frames)

    def _give_up(self, why: str) -> None:
        self._program = None
        self._node.miss(f"no Python stacks: {why}")


def _find_py_spy() -> str | None:
    """On the path, or beside the interpreter: an environment need not be activated."""
    return shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))


def _main_frames(pid: int, threads: list[dict[str, Any]]) -> list[str]:
    """The main thread's frames, outermost first. Not every thread has a name; the main one has the
    process's number."""
    for thread in threads:
        if thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread":
            frames = reversed(thread.get("frames", ()))
            return [f"{one['filename']}:{one['line']} {one['name']}" for one in frames]
    return []


def _top(frames: list[str]) -> str:
    """The innermost frame that is not a library's."""
    own = [line for line in frames if not any(part in line for part in ("-packages/", "/lib/python", "<"))]
    return (own or frames)[-1]


def _rank(pid: int) -> int:
    """The rank that a process's environment gives it, where we may read that."""
    try:
        return World.from_environ(environ_of(pid)).rank
    except UsageError:  # a launcher's odd variables are not ours to judge here
        return 0
