"""Graceful termination: SIGTERM goes to the ranks and not to torchrun, which would kill them 30 s later.

    python -m stoker.deploy.forward --patience 270 -- torchrun … train.py

What a pod runs. torch 2.8's torchrun gives its ranks 30 s whatever the pod's grace is; later ones have an
option for it. Ranks that get the signal from here save for as long as `--patience`; torchrun hears of it
only then. Whoever was sent away has not succeeded: the code is 143, also where all ranks ended with 0, or a
Job would count this node's part as done. Standard library only: it lives as long as the training does.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from os import kill
from pathlib import Path
from types import FrameType

from stoker.formats.sizes import counted

SENT_AWAY = 128 + signal.SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="stoker.deploy.forward", description=__doc__)
    parser.add_argument("--patience", type=float, required=True, help="seconds ranks have to save and leave")
    parser.add_argument("--failed", type=int, default=0, help="code of a training that failed; else its own")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    code, warned = run(given.command, patience_s=given.patience)
    if warned:
        return SENT_AWAY
    code = 128 - code if code < 0 else code
    return given.failed if code and given.failed else code


def run(command: Sequence[str], *, patience_s: float) -> tuple[int, bool]:
    """The command's exit code, and whether it was told to go meanwhile."""
    warned = threading.Event()
    child = subprocess.Popen(command)
    last = threading.Timer(patience_s, child.terminate)
    last.daemon = True

    def leave(number: int, frame: FrameType | None) -> None:
        if warned.is_set():
            return
        warned.set()
        found = list(ranks_of(child.pid))
        print(
            f"sent away: {patience_s:.0f} s for {counted(len(found), 'rank')} to save and leave",
            file=sys.stderr,
        )
        for pid in found:
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGTERM)
        last.start() if found else child.terminate()

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return child.wait(), warned.is_set()
    finally:
        last.cancel()
        for number, action in before.items():
            signal.signal(number, action)


def ranks_of(root: int) -> Iterator[int]:
    """Processes below this one that a launcher gave a rank; not the workers that they started."""
    children = _children()
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if _is_rank(pid):
                yield pid
            else:
                waiting.append(pid)


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            after_name = path.read_text(errors="replace").rpartition(")")[2].split()
            found.setdefault(int(after_name[1]), []).append(int(path.parent.name))
    return found


def _is_rank(pid: int) -> bool:
    with suppress(OSError):
        return b"\0LOCAL_RANK=" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
    return False


if __name__ == "__main__":
    sys.exit(main())
