"""Who works alone stays alone: random schedules of processes on two nodes, in a model of time and machines.

The leases are real, on a real folder; who lives, who is stopped and what the clock says is the model's. A
process that is inside may be stopped, may keep the lock, may be killed: its helper beats while it exists.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest

from stoker.stage.leases import lease as leases
from stoker.stage.leases.lease import Claim, Lease
from stoker.stage.leases.owner import Owner

TTL_S = 4.0
PROCESSES = 5


@dataclass
class Process:
    pid: int
    host: str
    lives: bool = True
    stopped: bool = False
    lease: Lease | None = None

    @property
    def inside(self) -> bool:
        return self.lives and self.lease is not None


class World:
    """Two nodes, one folder."""

    def __init__(self, folder: Path, luck: random.Random) -> None:
        self.luck, self.now, self.beats = luck, 1000.0, 0
        self.processes = [Process(pid=1000 + n, host="ab"[n % 2]) for n in range(PROCESSES)]
        self.current = self.processes[0]
        self.pulses: dict[Path, Process] = {}
        self.claims = {
            process.pid: Claim(folder / "work.lease", ttl_s=TTL_S, fenced=False, pulse=True)
            for process in self.processes
        }

    def clock(self) -> float:
        return self.now

    def getpid(self) -> int:
        return self.current.pid

    def take(self, process: Process) -> None:
        if process.lives and not process.stopped and not process.lease:
            self.current = process
            process.lease = self.claims[process.pid].try_take()

    def finish(self, process: Process) -> None:
        if process.inside and not process.stopped and process.lease:
            self.current = process
            process.lease.check()
            process.lease.release()
            process.lease = None

    def stop(self, process: Process) -> None:
        process.stopped = True

    def go_on(self, process: Process) -> None:
        process.stopped = False

    def kill(self, process: Process) -> None:
        if sum(each.lives for each in self.processes) > 1:
            process.lives = False

    def wait(self, process: Process) -> None:
        self.now += self.luck.choice([TTL_S / 6, TTL_S / 3, TTL_S])
        self.beat()

    def beat(self) -> None:
        self.beats += 1
        for record, parent in list(self.pulses.items()):
            if parent.lives and record.exists():
                os.utime(record, ns=(self.beats, self.beats))

    def step(self) -> None:
        moves = (self.take,) * 6 + (self.wait,) * 5 + (self.finish, self.stop, self.go_on, self.kill)
        self.luck.choice(moves)(self.luck.choice(self.processes))
        assert sum(process.inside for process in self.processes) <= 1, "two are inside"

    def end(self) -> None:
        """Whoever still lives gets in, in the end."""
        left = {process.pid for process in self.processes if process.lives}
        for process in self.processes:
            process.stopped = False
        for _ in range(40 * PROCESSES):
            for process in self.processes:
                if process.inside:
                    left.discard(process.pid)
                    self.finish(process)
                if process.pid in left:
                    self.take(process)
                assert sum(each.inside for each in self.processes) <= 1
            if not left:
                return
            self.now += TTL_S / 4
            self.beat()
        raise AssertionError(f"{left} never got in")


class _NoHeart:
    def add(self, lease: Lease) -> None: ...
    def remove(self, lease: Lease) -> None: ...


class _Pulse:
    def __init__(self, world: World, record: Path) -> None:
        self._world, self._record = world, record
        world.pulses[record] = world.current

    def close(self) -> None:
        self._world.pulses.pop(self._record, None)


def play(seed: int) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))
    world = World(folder, random.Random(seed))

    def owner(*, token: str, epoch: int, purpose: str, ttl_s: float) -> Owner:
        me = world.current
        return Owner(
            host=me.host, boot=me.host, pid_namespace="n", pid=me.pid, started="1", token=token, epoch=epoch,
            purpose=purpose, ttl_s=ttl_s,
        )  # fmt: skip

    def lives(self: Owner) -> bool | None:
        who = world.processes[self.pid - 1000]
        return who.lives if self.host == world.current.host else None

    try:
        with (
            mock.patch.object(Owner, "this_process", owner),
            mock.patch.object(Owner, "_lives", lives),
            mock.patch.object(Owner, "is_stopped", lambda self: world.processes[self.pid - 1000].stopped),
            mock.patch.object(leases._Heart, "of", return_value=_NoHeart()),
            mock.patch.object(leases, "Pulse", lambda record, **_: _Pulse(world, record)),
            mock.patch.object(leases.time, "monotonic", world.clock),
            mock.patch.object(leases, "_now", world.clock),
            mock.patch.object(os, "getpid", world.getpid),
            mock.patch.object(leases.seat, "is_on_own_disk", return_value=False),  # both nodes see it
        ):
            for _ in range(world.luck.randrange(10, 50)):
                world.step()
            world.end()
    except BaseException as error:
        error.add_note(f"seed {seed}") if hasattr(error, "add_note") else None
        raise
    finally:
        shutil.rmtree(folder)


def test_one_is_inside_at_any_time_and_everybody_in_the_end() -> None:
    first = random.randrange(1 << 30)
    for seed in range(first, first + 60):
        play(seed)


@pytest.mark.slow
def test_ten_thousand_schedules() -> None:
    for seed in range(10_000):
        play(seed)
