"""Who holds a lease: a process, named so that another one can prove it dead.

A process id alone proves nothing: it means another process in another container, on another node, after a
reboot, or once it is reused. So an owner carries its host, boot, namespaces and start time as well, and
`is_dead` answers True only where all of them can be compared here; everywhere else silence must decide.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Owner:
    """A process that holds a lease, or held it."""

    host: str
    boot: str
    pid_namespace: str
    pid: int
    started: str
    token: str
    epoch: int
    purpose: str = ""
    ttl_s: float

    def __post_init__(self) -> None:
        # What is read from a torn record must not reach the kernel as a process id.
        if not (
            isinstance(self.pid, int) and 0 < self.pid < 1 << 31 and isinstance(self.ttl_s, (int, float))
        ):
            raise ValueError(f"no owner has process id {self.pid!r} and TTL {self.ttl_s!r}")

    @classmethod
    def this_process(cls, *, token: str, epoch: int, purpose: str, ttl_s: float) -> Owner:
        return cls(
            host=os.uname().nodename,
            boot=_boot(),
            pid_namespace=_namespaces(),
            pid=os.getpid(),
            started=_started("self"),
            token=token,
            epoch=epoch,
            purpose=purpose,
            ttl_s=ttl_s,
        )

    @classmethod
    def from_json(cls, text: bytes) -> Owner | None:
        """The owner a record names; None for one that is torn, empty or not ours."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def is_dead(self) -> bool:
        """Whether it can be proven from here that the process is gone. Never a guess."""
        return self._lives() is False

    def is_running(self) -> bool:
        """Whether it can be proven from here that the process exists."""
        return self._lives() is True

    def _lives(self) -> bool | None:
        """None where that cannot be known."""
        here = (os.uname().nodename, _boot(), _namespaces())
        if (self.host, self.boot, self.pid_namespace) != here or not all(here) or not self.started:
            return None
        try:
            os.kill(self.pid, 0)  # a /proc that hides other users' processes cannot falsify this one
        except ProcessLookupError:
            return False
        except OSError:
            pass
        started = _started(str(self.pid))
        return started == self.started and not _is_zombie(self.pid) if started else None

    @property
    def clock(self) -> str:
        """Names the clock that start times and CLOCK_BOOTTIME are read from; empty if nothing does."""
        return f"{self.boot} {self.pid_namespace}" if self.boot and self.pid_namespace else ""

    @property
    def started_s(self) -> float:
        return int(self.started or 0) / os.sysconf("SC_CLK_TCK")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.purpose})" if self.purpose else "")


def _boot() -> str:
    return _read("/proc/sys/kernel/random/boot_id").strip()


def _namespaces() -> str:
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


def _has(kind: str) -> bool:
    return os.path.lexists(f"/proc/self/ns/{kind}")


def _started(pid: str) -> str:
    """Ticks from boot to the start of a process; empty where that cannot be read."""
    return "".join(_fields(pid)[19:20])


def _is_zombie(pid: int) -> bool:
    """Dead but not yet waited for. While one of its threads lives, so does what that thread writes."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return _fields(str(pid))[:1] in (["Z"], ["X"]) and len(threads) == 1


def _fields(pid: str) -> list[str]:
    """/proc/PID/stat after the program's name, which may hold anything: state, parent, …, start time."""
    return _read(f"/proc/{pid}/stat").rpartition(")")[2].split()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""
