"""Leases under stress, between containers, on full disks and without permission."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stage.leases.holders import PROGRAM, holding, take
from stoker.errors import StorageError
from stoker.stage.leases.lease import Claim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.integration

PROCESSES = 6
ROUNDS = 150

# Takes the lease again and again. Inside it puts its name on a table where there must be no other, and now
# and then dies there.
CROWD = """
import os, random, signal, sys, time
from pathlib import Path
from stoker.errors import LeaseLostError
from stoker.stage.leases.lease import Claim

here, rounds = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(os.getpid())
log = os.open(here / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

while len((here / "log").read_bytes().splitlines()) < rounds:
    lease = Claim(here / "x.lease").try_take()
    if lease is None:
        time.sleep(chance.uniform(0, 0.002))
        continue
    table = here / "table"
    if lease.previous_is_dead:
        table.unlink(missing_ok=True)
    os.close(os.open(table, os.O_CREAT | os.O_EXCL))  # fails if anybody else is inside
    os.write(log, f"{lease.epoch}\\n".encode())
    lease.check()
    if chance.random() < 0.3:
        os.kill(os.getpid(), signal.SIGKILL)
    table.unlink()
    lease.release()
"""


@contextmanager
def crowd(here: Path, environ: dict[str, str]) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that fight for one lease until the rounds are over or they are dead."""
    command = [sys.executable, "-c", CROWD, str(here), str(ROUNDS)]
    with ExitStack() as stack:
        processes = []
        for _ in range(PROCESSES):
            process = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        yield processes


def test_nobody_is_ever_in_anothers_seat(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    """Six processes, of which whoever is inside dies three times in ten."""
    rounds = 0
    while rounds < ROUNDS:
        with crowd(tmp_path, stoker_environ()) as processes:
            errors = [process.communicate(timeout=60)[1] for process in processes]
        assert [error for error in errors if error] == []
        rounds = len((tmp_path / "log").read_text().splitlines())
    epochs = [int(line) for line in (tmp_path / "log").read_text().splitlines()]
    # A takeover counts on from the epoch before; a release starts again.
    assert all(after in (before + 1, 1) for before, after in pairwise(epochs))
    assert max(epochs) > 1
    take(Claim(tmp_path / "x.lease")).release()
    assert {path.name for path in tmp_path.iterdir()} <= {"log", "table"}


# Takes the lease often, with a TTL so short that whoever is stopped loses it, and says whom it follows.
SLEEPERS = """
import os, random, sys, time
from pathlib import Path
from stoker.errors import LeaseLostError
from stoker.stage.leases.lease import Claim

here, chance = Path(sys.argv[1]), random.Random(os.getpid())
log = os.open(here / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
claim = Claim(here / "x.lease", ttl_s=0.1)
print("ready", flush=True)
while not (here / "over").exists():
    lease = claim.try_take()
    if lease is None:
        time.sleep(chance.uniform(0, 0.01))
        continue
    before = lease.previous.token if lease.previous else "-"
    os.write(log, f"{lease.owner.token} {before} {lease.epoch}\\n".encode())
    time.sleep(chance.uniform(0, 0.02))
    try:
        lease.check()
    except LeaseLostError:
        os.write(log, b"lost - 0\\n")
    lease.release()
"""


def test_no_owner_has_two_successors_however_they_sleep(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    command = [sys.executable, "-c", SLEEPERS, str(tmp_path)]
    with ExitStack() as stack:
        crowd = [
            stack.enter_context(
                subprocess.Popen(command, env=stoker_environ(), stdout=subprocess.PIPE, text=True)
            )
            for _ in range(PROCESSES)
        ]
        stack.callback(lambda: [process.kill() for process in crowd])
        for process in crowd:  # who is stopped before it has begun holds nothing
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        for _ in range(20):
            sleepers = random.sample(crowd, PROCESSES // 2)
            for process in sleepers:
                process.send_signal(signal.SIGSTOP)
            time.sleep(random.uniform(0, 0.3))  # the moment is the point: nothing to wait for
            for process in sleepers:
                process.send_signal(signal.SIGCONT)
            time.sleep(random.uniform(0, 0.05))
        (tmp_path / "over").touch()
        assert [process.wait(30) for process in crowd] == [0] * PROCESSES
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    epochs = {token: int(epoch) for token, _, epoch in lines if token != "lost"}
    followed = [before for _, before, _ in lines if before != "-"]
    assert len(set(followed)) == len(followed)
    assert followed  # some were taken over
    assert all(int(epoch) == epochs[before] + 1 for _, before, epoch in lines if before in epochs)
    take(Claim(tmp_path / "x.lease", ttl_s=0.1)).release()
    assert {path.name for path in tmp_path.iterdir()} == {"log", "over"}


def test_one_of_many_takers_succeeds_a_dead_owner(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    """All start at once on leases whose owner was just killed."""
    program = """
import sys, time
from pathlib import Path
from stoker.stage.leases.lease import Claim
claims = [Claim(Path(sys.argv[1]) / f"{number}.lease") for number in range(40)]
print("ready", flush=True)
sys.stdin.read()
won = [lease for lease in (claim.try_take() for claim in claims) if lease]
for lease in won:
    lease.check()
print(*(f"{lease.path.stem}:{lease.epoch}:{lease.previous_is_dead}" for lease in won))
"""
    holder = program.replace("sys.stdin.read()", "").replace(
        "print(*", "import os; os.kill(os.getpid(), 9); print(*"
    )
    subprocess.run(
        [sys.executable, "-c", holder, str(tmp_path)], env=stoker_environ(), stdout=subprocess.DEVNULL
    )
    assert len(list(tmp_path.glob("*.lease"))) == 40
    with ExitStack() as stack:
        takers = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program, str(tmp_path)],
                    env=stoker_environ(),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(PROCESSES)
        ]
        for taker in takers:
            assert taker.stdout
            assert taker.stdout.readline() == "ready\n"
        for taker in takers:
            assert taker.stdin
            taker.stdin.close()
        won = [word for taker in takers if taker.stdout for word in taker.stdout.read().split()]
    # Those who came later may succeed a taker that has ended since: each epoch has one winner all the same.
    assert sorted(won) == sorted(set(won))
    assert {word for word in won if word.endswith(":2:True")} == {f"{number}:2:True" for number in range(40)}


# --- containers -------------------------------------------------------------------------------------


@pytest.mark.usefixtures("need_root")
@pytest.mark.parametrize("mount", [["--mount-proc"], []], ids=["own-proc", "foreign-proc"])
def test_a_process_of_another_container_is_not_proven_dead(
    mount: list[str], tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    """Its process id is a stranger's here, or nobody's; so only its silence counts."""
    path = tmp_path / "x.lease"
    before = ["unshare", "--pid", "--fork", "--kill-child", *mount]
    with holding(path, environ=stoker_environ(), ttl_s=0.5, before=before) as holder:
        claim = Claim(path, ttl_s=0.5)
        assert claim.try_take() is None
        owner = claim.holder()
        assert owner is not None
        assert owner.pid < 10
        assert not owner.is_dead()
        assert holder.ask("check") == "fine"
        holder.process.kill()  # and with it the whole container
        with take(claim) as lease:
            assert (lease.epoch, lease.previous_is_dead) == (2, False)


@pytest.mark.usefixtures("need_root")
def test_a_foreign_proc_proves_nothing(tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]) -> None:
    """In a container whose /proc is the machine's, two processes cannot look each other up."""
    path = tmp_path / "x.lease"
    look = "import sys; from pathlib import Path; from stoker.stage.leases.lease import Claim;"
    look += "print(Claim(Path(sys.argv[1])).try_take())"
    said = tmp_path / "said"
    script = f'{sys.executable} -c "$HOLD" {path} 30 < /dev/zero > {said} & '
    script += f"while [ ! -s {said} ]; do sleep 0.05; done; {sys.executable} -c '{look}' {path}"
    environ = stoker_environ(
        HOLD=PROGRAM.replace("for line in sys.stdin", "while True: time.sleep(1)\nfor line in ()")
    )
    done = subprocess.run(
        ["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", script],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (said.read_text(), done.stdout) == ("held\n", "None\n"), done.stderr


# --- folders that refuse ----------------------------------------------------------------------------


@pytest.mark.usefixtures("need_root")
def test_a_full_disk_is_named_and_left_clean(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted("tmpfs", disk, "size=64k,nr_inodes=64"):
        held = take(Claim(disk / "held.lease", ttl_s=0.2))
        fill(disk / "ballast")
        before = sorted(disk.iterdir())
        with pytest.raises(StorageError, match="No space left"):
            Claim(disk / "new.lease").try_take()
        assert sorted(disk.iterdir()) == before
        assert held.renew()  # a heartbeat needs no space
        held.check()
        held.release()


@pytest.mark.usefixtures("need_root")
def test_a_read_only_filesystem_is_named(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted("tmpfs", disk, "ro"), pytest.raises(StorageError, match="Read-only file system"):
        Claim(disk / "x.lease").try_take()


@pytest.mark.usefixtures("need_root")
def test_a_folder_that_may_not_be_written_is_named(
    tmp_path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    program = "import os, sys; from pathlib import Path; from stoker.stage.leases.lease import Claim;"
    program += "os.setuid(65534); Claim(Path(sys.argv[1])).try_take()"
    done = subprocess.run(
        [sys.executable, "-c", program, "/x.lease"], env=stoker_environ(), capture_output=True, text=True
    )
    assert "StorageError: cannot take the lease /x.lease" in done.stderr
    assert "hint: check the permissions" in done.stderr


@contextmanager
def mounted(kind: str, where: Path, options: str) -> Iterator[None]:
    subprocess.run(["mount", "-t", kind, "-o", options, kind, str(where)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(where)], check=True)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
