"""Process identity: a process id alone means another one in another container, after a reboot, or once it is
used again.

Linux says all of it in /proc; where that is missing or hidden the answers are empty.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def boot() -> str:
    """This start of this machine."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def namespaces() -> str:
    """The namespaces that give a process id and a start time their meaning.

    Empty, so that nothing is proven, where /proc shows another namespace than ours (`unshare --pid` without
    a mount of its own): its numbers would be those of strangers.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time") if _has(kind))
    except OSError:
        return ""


def started(pid: int) -> str:
    """Ticks from boot to the start of a process; empty where there is none."""
    return "".join(_fields(pid)[19:20])


def is_zombie(pid: int) -> bool:
    """Dead but not yet waited for. While one of its threads lives, so does what that thread writes."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return _fields(pid)[:1] in (["Z"], ["X"]) and len(threads) == 1


def is_stopped(pid: int) -> bool:
    """Suspended by a signal or a debugger: it will do nothing until it is let."""
    return _fields(pid)[:1] in (["T"], ["t"])


def lives(pid: int) -> bool:
    """Not gone, and not a zombie. Of what is no child of ours nothing tells us the end."""
    return started(pid) != "" and not is_zombie(pid)


def environ_of(pid: int) -> dict[str, str]:
    """The variables a process was started with; none where we may not read them."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return {
        os.fsdecode(name): os.fsdecode(value) for name, _, value in (word.partition(b"=") for word in words)
    }


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C waits: in the middle of a start it would leave a process that nobody knows of."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _has(kind: str) -> bool:
    return os.path.lexists(f"/proc/self/ns/{kind}")


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat after the program's name, which may hold anything: state, parent, …, start time."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
