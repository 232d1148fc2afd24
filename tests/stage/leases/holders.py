"""A process that holds a lease and does what it is told, for tests of what becomes of it."""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from stoker.stage.leases.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from stoker.stage.leases.lease import Claim, Lease

PROGRAM = """
import sys, time
from pathlib import Path
from stoker.errors import LeaseLostError
from stoker.stage.leases.lease import Claim

claim = Claim(Path(sys.argv[1]), ttl_s=float(sys.argv[2]), purpose="a test")
while (lease := claim.try_take()) is None:
    time.sleep(0.01)
print("held", flush=True)
for line in sys.stdin:
    try:
        getattr(lease, line.strip())()
        print("fine", flush=True)
    except LeaseLostError:
        print("lost", flush=True)
"""


class Holder:
    """A process that took a lease."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid

    def says(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, verb: str) -> str:
        """`check`, `release` or `renew`: `fine` or `lost`."""
        assert self.process.stdin
        self.process.stdin.write(f"{verb}\n")
        self.process.stdin.flush()
        return self.says()


@contextmanager
def holding(
    path: Path, *, environ: dict[str, str], ttl_s: float = 30.0, before: Sequence[str] = ()
) -> Iterator[Holder]:
    """Run a holder, through a program like `unshare` if one is given; killed at the end."""
    with subprocess.Popen(
        [*before, sys.executable, "-c", PROGRAM, str(path), str(ttl_s)],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            holder = Holder(process)
            assert holder.says() == "held"
            yield holder
        finally:
            process.kill()


def take(claim: Claim, *, seconds: float = 30.0) -> Lease:
    """Try until it is taken."""
    return wait_for(claim.try_take, "the lease is taken", seconds=seconds)


def wait_for(ask: Callable[[], Lease | None], what: str, *, seconds: float = 30.0) -> Lease:
    deadline = time.monotonic() + seconds
    while (answer := ask()) is None:
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain until {what}"
        time.sleep(0.01)
    return answer


def fall_silent(lease: Lease) -> None:
    """Stop renewing, as a holder does whose machine is gone: one that runs here is never overtaken."""
    lease._heart.remove(lease)
    owner = Owner.from_json(lease._record.read_bytes())
    if owner and owner.is_running():
        lease._record.write_bytes(replace(owner, host="a machine that is gone").to_json())
