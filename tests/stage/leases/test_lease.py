"""Leases: one holder at a time, whatever becomes of it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from stage.leases.holders import fall_silent, holding, take, wait_for
from stoker.errors import LeaseLostError, StorageError
from stoker.stage.leases.lease import Claim, Lease, _Heart
from stoker.stage.leases.owner import Owner

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


SHORT_S = 0.15


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "corpus.lease"


@pytest.fixture
def lease(path: Path) -> Iterator[Lease]:
    with take(Claim(path, purpose="a test")) as lease:
        yield lease


def left(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.parent.iterdir())


def rewrite(path: Path, **changes: object) -> Owner:
    """Put another owner into the record of whoever holds the lease."""
    record = next(path.glob("*.json"))
    owner = Owner.from_json(record.read_bytes())
    assert owner
    owner = replace(owner, **changes)  # type: ignore[arg-type]
    record.write_bytes(owner.to_json())
    return owner


# --- taking and releasing ---------------------------------------------------------------------------


def test_a_free_lease_is_taken_at_once(path: Path) -> None:
    with take(Claim(path)) as lease:
        assert (lease.epoch, lease.previous, lease.previous_is_dead) == (1, None, False)
        lease.check()


def test_a_held_lease_is_not_given_to_another(path: Path, lease: Lease) -> None:
    assert Claim(path).try_take() is None


def test_a_release_leaves_nothing_behind(path: Path) -> None:
    take(Claim(path)).release()
    assert left(path) == []


def test_a_release_twice_harms_nobody(path: Path) -> None:
    first = take(Claim(path))
    first.release()
    with take(Claim(path)) as second:
        first.release()
        second.check()


def test_a_released_lease_does_not_check(path: Path) -> None:
    lease = take(Claim(path))
    lease.release()
    with pytest.raises(LeaseLostError, match=r"corpus\.lease"):
        lease.check()


def test_the_holder_is_named(path: Path, lease: Lease) -> None:
    holder = Claim(path).holder()
    assert holder == lease.owner
    assert str(holder) == f"process {os.getpid()} on {os.uname().nodename} (a test)"


def test_nobody_holds_a_free_lease(path: Path) -> None:
    assert Claim(path).holder() is None


def test_the_folder_above_is_made(tmp_path: Path) -> None:
    with take(Claim(tmp_path / "not" / "yet" / "x.lease")) as lease:
        lease.check()


def test_a_lease_lives_longer_than_its_ttl(path: Path) -> None:
    ttl_s = 2 * SHORT_S
    with take(Claim(path, ttl_s=ttl_s)) as lease:
        observer, end = Claim(path, ttl_s=ttl_s), time.monotonic() + 3 * ttl_s
        while time.monotonic() < end:
            assert observer.try_take() is None
            time.sleep(SHORT_S / 20)
        lease.check()


def test_many_leases_share_one_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    leases = [take(Claim(tmp_path / f"{number}.lease")) for number in range(5)]
    assert threading.active_count() == before + 1
    for lease in leases:
        lease.release()


# --- owners that die --------------------------------------------------------------------------------


def test_a_killed_holder_is_succeeded_at_once(
    path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    with holding(path, environ=stoker_environ()) as holder:
        holder.process.kill()
        holder.process.wait()
        with take(Claim(path)) as lease:
            assert (lease.epoch, lease.previous_is_dead) == (2, True)
            assert str(lease.previous) == f"process {holder.pid} on {os.uname().nodename} (a test)"
            assert len(list(path.iterdir())) == 2
    assert left(path) == []


def test_a_zombie_is_succeeded_at_once(path: Path, stoker_environ: Callable[..., dict[str, str]]) -> None:
    with holding(path, environ=stoker_environ()) as holder:
        os.kill(holder.pid, signal.SIGKILL)
        os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)  # dead, but not waited for
        with take(Claim(path)) as lease:
            assert lease.previous_is_dead


def test_a_reused_process_id_does_not_keep_a_lease(path: Path, lease: Lease) -> None:
    rewrite(path, started="1")  # of this very process, which lives, but did not start with the kernel
    with take(Claim(path)) as successor:
        assert successor.previous_is_dead
    with pytest.raises(LeaseLostError):
        lease.check()


@pytest.mark.parametrize(
    "changes",
    [
        {"host": "another"},
        {"pid_namespace": "pid:[1]"},
        {"started": ""},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_cannot_be_proven_dead_must_be_silent(path: Path, changes: dict[str, str]) -> None:
    """A leftover of an earlier boot, another host or container: the process id says nothing here."""
    lease = take(Claim(path, ttl_s=SHORT_S))
    owner = rewrite(path, pid=2**22 + 1, **changes)
    assert not owner.is_dead()
    assert Claim(path, ttl_s=SHORT_S).try_take() is None
    fall_silent(lease)
    with take(Claim(path, ttl_s=SHORT_S)) as successor:
        assert (successor.epoch, successor.previous, successor.previous_is_dead) == (2, owner, False)


def test_on_a_disk_of_this_machine_an_earlier_boot_is_over(path: Path) -> None:
    lease = take(Claim(path))
    rewrite(path, boot="00000000-0000-0000-0000-000000000000")
    with take(Claim(path), seconds=5) as successor:
        assert successor.previous_is_dead
    lease.release()


def test_on_a_shared_disk_another_boot_may_be_another_machine(path: Path, monkeypatch) -> None:
    monkeypatch.setattr("stoker.stage.leases.seat._OWN_DISKS", ())
    lease = take(Claim(path))
    rewrite(path, boot="00000000-0000-0000-0000-000000000000")
    assert Claim(path).try_take() is None
    lease.release()


def test_a_process_is_not_dead_to_itself(lease: Lease) -> None:
    assert not lease.owner.is_dead()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # it is what this test is about
def test_a_forked_child_does_not_hold_its_parents_lease(path: Path, lease: Lease) -> None:
    child = os.fork()
    if child == 0:  # no assertion may leave this block: pytest would go on twice
        try:
            lease.check()
        except LeaseLostError:
            lease.release()
            with take(Claim(path.with_name("own.lease"))) as own:
                own.check()
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    lease.check()


# --- owners that sleep ------------------------------------------------------------------------------


def test_a_holder_that_sleeps_is_succeeded_and_fenced(
    path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    with holding(path, environ=stoker_environ(), ttl_s=SHORT_S) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        with take(Claim(path, ttl_s=SHORT_S)) as successor:
            assert (successor.epoch, successor.previous_is_dead) == (2, False)
            os.kill(holder.pid, signal.SIGCONT)
            assert holder.ask("check") == "lost"
            assert holder.ask("release") == "fine"
            successor.check()
            assert Claim(path, ttl_s=SHORT_S).try_take() is None
    assert left(path) == []


def test_a_holder_that_slept_unnoticed_goes_on(
    path: Path, stoker_environ: Callable[..., dict[str, str]]
) -> None:
    with holding(path, environ=stoker_environ(), ttl_s=SHORT_S) as holder:
        os.kill(holder.pid, signal.SIGSTOP)
        time.sleep(2 * SHORT_S)  # past its TTL, and nobody looked
        os.kill(holder.pid, signal.SIGCONT)
        assert holder.ask("check") == "fine"


def test_an_observer_that_slept_judges_nobody(path: Path, lease: Lease) -> None:
    fall_silent(lease)
    observer = Claim(path, ttl_s=SHORT_S)
    rewrite(path, ttl_s=SHORT_S)
    assert observer.try_take() is None
    time.sleep(3 * SHORT_S)  # one long gap is not a silence it has witnessed
    assert observer.try_take() is None


def test_an_impatient_observer_grants_the_owners_ttl(path: Path, lease: Lease) -> None:
    observer, end = Claim(path, ttl_s=0.01), time.monotonic() + SHORT_S
    while time.monotonic() < end:
        assert observer.try_take() is None


def test_a_lease_that_cannot_be_renewed_does_not_check(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    with take(Claim(path, ttl_s=SHORT_S)) as lease:
        lease.check()
        monkeypatch.setattr(os, "utime", refuse)
        time.sleep(1.5 * SHORT_S)
        with pytest.raises(LeaseLostError, match="could not be renewed"):
            lease.check()
        monkeypatch.undo()


# --- clocks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("year_s", [-(10**9), 10**9], ids=["past", "future"])
def test_only_change_counts_in_a_heartbeat(path: Path, year_s: int) -> None:
    """A node whose clock is thirty years off holds a lease like any other."""
    lease = take(Claim(path, ttl_s=60))
    fall_silent(lease)
    observer, record = Claim(path, ttl_s=SHORT_S), next(path.glob("*.json"))
    rewrite(path, ttl_s=SHORT_S)
    end = time.monotonic() + 2.5 * SHORT_S
    while time.monotonic() < end:
        os.utime(record, ns=(0, time.time_ns() + year_s * 10**9))
        assert observer.try_take() is None
        time.sleep(SHORT_S / 20)
    with take(observer) as successor:
        assert successor.epoch == 2


# --- leases that are broken -------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"host": "a', b"[1, 2]", b'{"pid": 1}'])
def test_a_torn_record_counts_as_an_unknown_owner(path: Path, content: bytes) -> None:
    fall_silent(take(Claim(path, ttl_s=SHORT_S)))
    next(path.glob("*.json")).write_bytes(content)
    assert Claim(path).holder() is None
    with take(Claim(path, ttl_s=SHORT_S)) as lease:
        assert (lease.epoch, lease.previous, lease.previous_is_dead) == (2, None, False)


def test_a_record_with_an_impossible_process_is_torn(lease: Lease) -> None:
    record = json.loads(lease.owner.to_json())
    for pid in ("12", 0, -1, 1 << 40):
        assert Owner.from_json(json.dumps(record | {"pid": pid}).encode()) is None


def test_a_missing_record_counts_as_an_unknown_owner(path: Path) -> None:
    take(Claim(path, ttl_s=SHORT_S))
    next(path.glob("*.json")).unlink()
    with take(Claim(path, ttl_s=SHORT_S)) as lease:
        assert (lease.epoch, lease.previous) == (2, None)


def test_an_empty_folder_is_free(path: Path) -> None:
    path.mkdir()
    with take(Claim(path)) as lease:
        lease.check()


def test_a_release_that_was_cut_short_is_finished_by_the_next(path: Path) -> None:
    lease = take(Claim(path))
    fall_silent(lease)
    next(path.glob("seat-*")).unlink()  # the holder died after its first step
    with take(Claim(path)) as successor:
        successor.check()
        with pytest.raises(LeaseLostError):
            lease.check()
    assert left(path) == []


def test_a_founder_that_died_halfway_leaves_nothing_for_long(path: Path) -> None:
    (path.parent / "corpus.lease.0123456789abcdef.new").mkdir()
    take(Claim(path)).release()
    assert left(path) == []


def test_dead_founders_of_neighbours_are_swept_and_living_ones_are_not(path: Path) -> None:
    me = Owner.this_process(token="t", epoch=1, purpose="", ttl_s=1)
    for name, owner in (("dead", replace(me, started="1")), ("living", me)):
        new = path.parent / f"{name}.lease.t.new"
        new.mkdir()
        (new / "t.json").write_bytes(owner.to_json())
        (new / "seat-1-t").touch()
    take(Claim(path)).release()
    assert left(path) == ["living.lease.t.new"]


def test_a_file_in_the_place_of_the_folder_is_named(path: Path) -> None:
    path.write_text("something else")
    with pytest.raises(StorageError, match=r"cannot take the lease .*corpus\.lease: Not a directory"):
        Claim(path).try_take()


def test_a_lease_that_nobody_could_renew_is_given_back(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_Heart, "_all", {})
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError):
            Claim(path).try_take()
    assert left(path) == []
    with take(Claim(path, ttl_s=SHORT_S)) as lease:
        before = lease._renewed_at
        wait_for(lambda: lease if lease._renewed_at > before else None, "a heartbeat")
