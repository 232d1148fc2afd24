"""Who holds a lease: a process, named so that another one can prove it dead.

A process id alone proves nothing: it means another process in another container, on another node, after a
reboot, or once it is reused. So an owner carries its host, boot, namespaces and start time as well, and
`is_dead` answers True only where all of them can be compared here; everywhere else silence must decide.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from stoker.processes import boot, is_zombie, namespaces, started


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
            boot=boot(),
            pid_namespace=namespaces(),
            pid=os.getpid(),
            started=started(os.getpid()),
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
        here = (os.uname().nodename, boot(), namespaces())
        if (self.host, self.boot, self.pid_namespace) != here or not all(here) or not self.started:
            return None
        try:
            os.kill(self.pid, 0)  # a /proc that hides other users' processes cannot falsify this one
        except ProcessLookupError:
            return False
        except OSError:
            pass
        now = started(self.pid)
        return now == self.started and not is_zombie(self.pid) if now else None

    @property
    def clock(self) -> str:
        """Names the clock that start times and CLOCK_BOOTTIME are read from; empty if nothing does."""
        return f"{self.boot} {self.pid_namespace}" if self.boot and self.pid_namespace else ""

    @property
    def started_s(self) -> float:
        return int(self.started or 0) / os.sysconf("SC_CLK_TCK")

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" ({self.purpose})" if self.purpose else "")
