"""`stoker watch --pid`: a running job observed from outside. No spans and no steps: what the machine, the
cards and the processes' states show, and stacks where py-spy is installed and permitted."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from stoker.errors import UsageError
from stoker.observe.sampler import lives
from stoker.observe.watch import Node, Options, begin_run, sampling
from stoker.runs.files import Clock, Events, process_key, write_meta

_LOOK_S = 0.5
_LOOKS_PER_STACK = 20
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
    node.tell(ended=ended, ended_at=time.time())
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
        self._program = shutil.which("py-spy")
        key = process_key(node.name, pid)
        self._events = Events(folder / f"events-{key}.jsonl")
        identity = {"key": key, "pid": pid, "node": node.name, "rank": _rank(pid), "began": time.time()}
        write_meta(folder / f"proc-{key}.json", {**identity, "clock": Clock.here().as_dict()})
        if self._program is None:
            node.miss("no Python stacks: py-spy is not installed")

    def take(self) -> None:
        if self._program is None:
            return
        command = [self._program, "dump", "--json", "--nonblocking", "--pid", str(self._pid)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            self._program = None
            lines = done.stderr.strip().splitlines() or ["py-spy failed"]
            self._node.miss(f"no Python stacks: {lines[0]}")
            return
        frames = _main_frames(json.loads(done.stdout))
        if frames:
            self._events.say("stack", frames[-1], seconds=0.0, frames=frames)


def _main_frames(threads: list[dict[str, Any]]) -> list[str]:
    """The main thread's frames, outermost first."""
    for thread in threads:
        if thread.get("thread_name") == "MainThread":
            frames = reversed(thread.get("frames", ()))
            return [f"{one['filename']}:{one['line']} {one['name']}" for one in frames]
    return []


def _rank(pid: int) -> int:
    """RANK in the process's environment, where we may read that."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return 0
    found = [word.partition(b"=")[2] for word in words if word.startswith(b"RANK=")]
    return int(found[0]) if found and found[0].isdigit() else 0
