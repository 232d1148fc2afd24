"""Lease owner identity: a process, named so that another one can prove it dead.

A process id alone proves nothing: it means another process in another container, on another node, after a
reboot, or once it is reused. So an owner carries its host, boot, namespaces and start time as well, and
`is_dead` answers True only where all of them can be compared here; everywhere else silence must decide.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass

from stoker.processes import boot, is_stopped, is_zombie, namespaces, started

MOST_TTL_S = 24 * 3600.0  # of silence: nobody waits for longer than this, whatever a record says


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
        # What is read from a torn or forged record must not reach the kernel as a process id, a terminal as
        # what it obeys, nor us as a silence that never ends.
        texts = (self.host, self.boot, self.pid_namespace, self.started, self.token, self.purpose)
        numbers = (self.pid, self.epoch)
        if not all(isinstance(text, str) and text.isprintable() and len(text) < 1024 for text in texts):
            raise ValueError("an owner says who it is in printable text")
        if not all(type(number) is int and 0 <= number < 1 << 31 for number in numbers) or not self.pid:
            raise ValueError(f"no owner has process id {self.pid!r} and epoch {self.epoch!r}")
        if not isinstance(self.ttl_s, (int, float)) or not 0 <= self.ttl_s <= MOST_TTL_S:
            raise ValueError(f"no owner has TTL {self.ttl_s!r}")
        if self.started and not self.started.isdecimal():
            raise ValueError(f"no process has started at {self.started!r}")

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
            purpose="".join(letter if letter.isprintable() else "?" for letter in purpose)[:200],
            ttl_s=min(ttl_s, MOST_TTL_S),
        )

    @classmethod
    def from_json(cls, text: bytes) -> Owner | None:
        """The owner a record names; None for one that is torn, empty or not ours."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError):
            return None

    def to_json(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    def is_dead(self) -> bool:
        """Whether it can be proven from here that the process is gone. Never a guess."""
        return self._lives() is False

    def is_running(self) -> bool:
        """Whether it can be proven from here that the process exists."""
        return self._lives() is True

    def is_of_another_boot(self) -> bool:
        """Whether it ran under another kernel than ours: elsewhere, or here before this machine started."""
        return bool(self.boot and boot()) and self.boot != boot()

    def is_stopped(self) -> bool:
        """Whether it is suspended just now (SIGSTOP, Ctrl-Z); only of one that is running."""
        return is_stopped(self.pid)

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
