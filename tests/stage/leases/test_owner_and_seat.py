"""What an owner may be, what a lease's folder looks like on the disk, and each call that decides."""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage.leases.holders import fall_silent, take
from stoker.errors import LeaseLostError, StorageError
from stoker.processes import boot, namespaces, started
from stoker.stage.leases import lease as leases
from stoker.stage.leases import seat
from stoker.stage.leases.lease import TTL_S, Claim, Lease
from stoker.stage.leases.owner import MOST_TTL_S, Owner

ME = Owner.this_process(token="00ff", epoch=1, purpose="a test", ttl_s=10.0)


# --- owners ---------------------------------------------------------------------------------------

TEXTS = ("host", "boot", "pid_namespace", "token", "purpose")


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize(
    ("text", "may"), [("x" * 1023, True), ("x" * 1024, False), ("a\x1b[31m", False), ("", True), (7, False)]
)
def test_an_owner_says_who_it_is_in_short_printable_text(name: str, text: object, may: bool) -> None:
    if may:
        assert asdict(replace(ME, **{name: text}))[name] == text
    else:
        with pytest.raises(ValueError, match="printable text"):
            replace(ME, **{name: text})


@pytest.mark.parametrize(
    ("changes", "may"),
    [
        ({"pid": 1}, True),
        ({"pid": 0}, False),
        ({"pid": -1}, False),
        ({"pid": (1 << 31) - 1}, True),
        ({"pid": 1 << 31}, False),
        ({"pid": True}, False),
        ({"pid": 1.0}, False),
        ({"epoch": 0}, True),
        ({"epoch": -1}, False),
        ({"epoch": (1 << 31) - 1}, True),
        ({"epoch": 1 << 31}, False),
        ({"ttl_s": 0}, True),
        ({"ttl_s": -0.001}, False),
        ({"ttl_s": 86400.0}, True),
        ({"ttl_s": 86400.001}, False),
        ({"ttl_s": float("nan")}, False),
        ({"ttl_s": "5"}, False),
        ({"started": ""}, True),
        ({"started": "17"}, True),
        ({"started": "1.5"}, False),
        ({"started": "-1"}, False),
    ],
)
def test_numbers_of_an_owner_have_bounds(changes: dict[str, object], may: bool) -> None:
    assert ME.to_json().endswith(b"\n")
    if may:
        assert Owner.from_json(replace(ME, **changes).to_json()) == replace(ME, **changes)  # type: ignore[arg-type]
    else:
        with pytest.raises(ValueError, match=r"no (owner|process)"):
            replace(ME, **changes)  # type: ignore[arg-type]


def test_this_process_is_named_as_the_kernel_names_it() -> None:
    assert (ME.host, ME.boot, ME.pid_namespace) == (os.uname().nodename, boot(), namespaces())
    assert (ME.pid, ME.started, ME.token, ME.epoch, ME.ttl_s) == (
        os.getpid(),
        started(os.getpid()),
        "00ff",
        1,
        10.0,
    )
    long = Owner.this_process(token="t", epoch=3, purpose="\n" + "p" * 400, ttl_s=1e9)
    assert long.purpose == "?" + "p" * 199
    assert long.ttl_s == MOST_TTL_S == 86400.0
    assert str(ME) == f"process {os.getpid()} on {os.uname().nodename} (a test)"
    assert str(replace(ME, purpose="")) == f"process {os.getpid()} on {os.uname().nodename}"


def test_clocks_can_be_compared_on_one_boot_and_namespace_only() -> None:
    assert ME.clock == f"{boot()} {namespaces()}"
    assert replace(ME, boot="").clock == replace(ME, pid_namespace="").clock == ""
    assert replace(ME, started="250").started_s == 250 / os.sysconf("SC_CLK_TCK")
    assert replace(ME, started="").started_s == 0


@pytest.mark.parametrize("name", ["host", "boot", "pid_namespace", "started"])
@pytest.mark.parametrize("value", ["", "9"])
def test_a_process_elsewhere_is_neither_dead_nor_running(name: str, value: str) -> None:
    other = replace(ME, **{name: value})
    if name == "started" and value:  # another process that had this number, here
        assert (other.is_dead(), other.is_running()) == (True, False)
    else:
        assert (other.is_dead(), other.is_running()) == (False, False)
    assert (ME.is_dead(), ME.is_running(), ME.is_stopped()) == (False, True, False)


def test_where_this_kernel_does_not_say_who_it_is_nobody_is_dead() -> None:
    gone = replace(ME, pid=2**22 + 1)
    assert gone.is_dead()
    with mock.patch("stoker.stage.leases.owner.boot", return_value=""):
        assert not replace(gone, boot="").is_dead()


def test_a_process_that_another_user_owns_is_no_dead_one() -> None:
    with mock.patch("os.kill", side_effect=PermissionError(1, "no")):
        assert ME.is_running()
    with mock.patch("stoker.stage.leases.owner.started", return_value=""):
        assert (ME.is_dead(), ME.is_running()) == (False, False)
    with mock.patch("stoker.stage.leases.owner.is_zombie", return_value=True):
        assert ME.is_dead()


@pytest.mark.parametrize(
    ("own", "other", "is_other"), [("a", "b", True), ("a", "a", False), ("", "b", False), ("a", "", False)]
)
def test_another_boot_is_one_that_both_can_name(own: str, other: str, is_other: bool) -> None:
    with mock.patch("stoker.stage.leases.owner.boot", return_value=own):
        assert replace(ME, boot=other).is_of_another_boot() is is_other


# --- the folder -----------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "x.lease"


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_a_lease_is_a_record_and_a_seat_that_names_it(path: Path) -> None:
    assert seat.found(path, ME)
    assert names(path) == ["00ff.json", "seat-1-00ff"]
    assert (path / "00ff.json").read_bytes() == ME.to_json()
    assert (path / "seat-1-00ff").read_bytes() == b""
    assert not seat.found(path, replace(ME, token="11"))
    assert names(path.parent) == ["x.lease"]
    with seat.opened(path) as folder:
        assert folder is not None
        view = seat.look(folder)
        assert view is not None
        assert (view.seat, view.epoch, view.token, view.owner) == ("seat-1-00ff", 1, "00ff", ME)
        assert view.folder == path.stat().st_ino
        assert view.beat_ns == (path / "00ff.json").stat().st_mtime_ns
        next_ = replace(ME, token="22", epoch=2)
        assert seat.take_over(folder, view, next_)
        assert names(path) == ["22.json", "seat-2-22"]
        assert not seat.take_over(folder, view, replace(ME, token="33", epoch=2))
        assert names(path) == ["22.json", "seat-2-22"]
    seat.leave(path, ME)  # who was overtaken takes nothing away
    assert names(path) == ["22.json", "seat-2-22"]
    seat.leave(path, next_)
    assert not path.exists()
    seat.leave(path, next_)


@given(
    epoch=st.integers(0, 10**11),
    rest=st.sampled_from(["-t", "", "-"]),
    kind=st.sampled_from(["seat", "Seat", "a"]),
)
def test_the_epoch_of_a_name_is_that_of_a_seat_of_nine_figures_at_most(
    epoch: int, rest: str, kind: str
) -> None:
    known = kind == "seat" and epoch < 10**9
    assert seat._epoch(f"{kind}-{epoch}{rest}") == (epoch if known else 0)


def test_of_several_seats_the_highest_counts_and_what_was_left_goes_with_a_takeover(path: Path) -> None:
    path.mkdir()
    for name in ("seat-2-a", "seat-10-b", "seat-9-c", "old.json", ".nfs0001"):
        (path / name).touch()
    with seat.opened(path) as folder:
        assert folder is not None
        view = seat.look(folder)
        assert view is not None
        assert (view.seat, view.owner, view.beat_ns) == ("seat-10-b", None, 0)
        assert seat.take_over(folder, view, replace(ME, epoch=11))
    assert names(path) == [".nfs0001", "00ff.json", "seat-11-00ff"]


def test_a_record_of_another_token_is_nobodys(path: Path) -> None:
    seat.found(path, ME)
    (path / "00ff.json").write_bytes(replace(ME, token="other").to_json())
    with seat.opened(path) as folder:
        assert folder is not None
        view = seat.look(folder)
        assert view is not None
        assert view.owner is None
        assert view.beat_ns == (path / "00ff.json").stat().st_mtime_ns


@pytest.mark.parametrize("foreign", ["link", "folder", "fifo"])
def test_what_is_no_file_in_the_place_of_a_record_is_not_opened(path: Path, foreign: str) -> None:
    seat.found(path, ME)
    record = path / "00ff.json"
    record.unlink()
    if foreign == "link":
        record.symlink_to("/etc/passwd")
    elif foreign == "folder":
        record.mkdir()
    else:
        os.mkfifo(record)
    with seat.opened(path) as folder:
        assert folder is not None
        view = seat.look(folder)
        assert view is not None
        assert (view.seat, view.owner) == ("seat-1-00ff", None)


def test_a_folder_that_is_not_there_or_is_removed_meanwhile_is_nobodys(path: Path) -> None:
    with seat.opened(path) as folder:
        assert folder is None
    seat.found(path, ME)
    with seat.opened(path) as folder:
        assert folder is not None
        seat.leave(path, ME)
        view = seat.look(folder)
        assert view is None or view.names == ()
        assert not seat.take_over(
            folder, seat.View(folder=1, names=(), seat="seat-1-00ff"), replace(ME, epoch=2)
        )


def test_an_answer_that_was_lost_is_looked_up(path: Path) -> None:
    """NFS may do a rename and lose the answer: asked again, the server knows no such name."""
    rename = os.rename

    def lost(*args: object, **kwargs: object) -> None:
        rename(*args, **kwargs)  # type: ignore[arg-type]
        raise OSError(errno.ENOENT, "no such file")

    with mock.patch.object(Path, "rename", lambda self, to: lost(self, to)):
        assert seat.found(path, ME)
    with seat.opened(path) as folder, mock.patch("os.rename", lost):
        assert folder is not None
        view = seat.look(folder)
        assert view is not None
        assert seat.take_over(folder, view, replace(ME, epoch=2, token="22"))
    assert names(path) == ["22.json", "seat-2-22"]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_other_errors_of_a_decision_are_raised_and_nothing_is_left(path: Path, code: int) -> None:
    with (
        mock.patch.object(Path, "rename", side_effect=OSError(code, "odd")),
        pytest.raises(OSError, match="odd"),
    ):
        seat.found(path, ME)
    assert list(path.parent.iterdir()) == []
    seat.found(path, ME)
    with seat.opened(path) as folder:
        assert folder is not None
        view = seat.look(folder)
        assert view is not None
        with mock.patch("os.rename", side_effect=OSError(code, "odd")), pytest.raises(OSError, match="odd"):
            seat.take_over(folder, view, replace(ME, epoch=2, token="22"))
    assert names(path) == ["00ff.json", "seat-1-00ff"]


@pytest.mark.parametrize(
    ("mode", "folder_mode", "record_mode"),
    [(0o3770, 0o2770, 0o640), (0o755, None, None), (0o1777, None, None)],
)
def test_in_a_groups_folder_any_member_may_take_over(
    path: Path, mode: int, folder_mode: int | None, record_mode: int | None
) -> None:
    path.parent.chmod(mode)
    old = os.umask(0o077)
    try:
        assert seat.found(path, ME)
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) & 0o777 == (folder_mode or 0o700) & 0o777
    assert stat.S_IMODE((path / "00ff.json").stat().st_mode) == (record_mode or 0o600)


@pytest.mark.parametrize(
    ("filesystem", "own"), [("ext4", True), ("tmpfs", True), ("nfs4", False), ("lustre", False)]
)
def test_a_disk_is_our_own_by_its_filesystem(path: Path, filesystem: str, own: bool) -> None:
    device = path.parent.stat().st_dev
    line = f"30 1 {os.major(device)}:{os.minor(device)} / / rw - {filesystem} /dev/x rw\n"
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with mock.patch.object(Path, "read_text", return_value=line):
            assert seat.is_on_own_disk(folder) is own
        with mock.patch.object(Path, "read_text", side_effect=OSError(2, "no /proc")):
            assert seat.is_on_own_disk(folder) is False
        with mock.patch.object(Path, "read_text", return_value=line.replace(":", ":9", 1)):
            assert seat.is_on_own_disk(folder) is False
    finally:
        os.close(folder)


# --- claims and leases ----------------------------------------------------------------------------


def test_a_lease_beats_four_times_in_its_ttl(path: Path) -> None:
    assert TTL_S == 10.0
    with take(Claim(path, ttl_s=6.0, purpose="p")) as lease:
        assert lease.beat_s == 1.5
        assert (lease.owner.ttl_s, lease.owner.purpose, lease.epoch) == (6.0, "p", 1)
        assert len(lease.owner.token) == 16


def test_a_holder_is_vouched_for_if_it_runs_here_or_was_seen_to_renew(path: Path) -> None:
    claim = Claim(path, ttl_s=60)
    assert not claim.is_vouched()
    lease = take(Claim(path, ttl_s=60))
    assert claim.is_vouched()
    fall_silent(lease)  # another machine's, as far as one can see
    assert not claim.is_vouched()
    assert claim.try_take() is None
    assert not claim.is_vouched()
    os.utime(lease._record, ns=(1, 1))
    assert claim.try_take() is None
    assert claim.is_vouched()
    assert not Claim(path).is_vouched()
    lease.release()


def test_silence_is_counted_up_to_half_a_ttl_at_a_time_and_suffices_when_it_is_a_ttl(path: Path) -> None:
    lease = take(Claim(path, ttl_s=8.0))
    fall_silent(lease)
    now = [100.0]
    with mock.patch.object(leases.time, "monotonic", side_effect=lambda: now[0]):
        for gaps, taken in (
            ((0, 3.99, 3.99), False),
            ((0, 4, 4), True),
            ((0, 100, 3.9), False),
            ((0, 4, 3.9, 0.11), True),
        ):
            claim = Claim(path, ttl_s=2.0)  # the owner's own is longer, and counts
            with mock.patch.object(Claim, "_succeed", return_value="taken"):
                for gap in gaps:
                    now[0] += gap
                    got = claim.try_take()
            assert (got == "taken") is taken, gaps
    lease.release()


@pytest.mark.parametrize(
    ("fenced", "stopped", "taken"), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_who_is_stopped_is_overtaken_only_where_every_step_is_fenced(
    path: Path, fenced: bool, stopped: bool, taken: bool
) -> None:
    lease = take(Claim(path, ttl_s=8.0))
    lease._heart.remove(lease)
    now = [0.0]
    with (
        mock.patch.object(leases.time, "monotonic", side_effect=lambda: now[0]),
        mock.patch.object(Owner, "is_stopped", return_value=stopped),
        mock.patch.object(Claim, "_succeed", return_value="taken"),
    ):
        claim = Claim(path, ttl_s=8.0, fenced=fenced)
        for _ in range(4):
            got = claim.try_take()
            now[0] += 4
    assert (got == "taken") is taken
    lease.release()


def test_a_folder_without_a_seat_is_swept_at_the_second_look(path: Path) -> None:
    path.mkdir()
    (path / "torn.json").touch()
    claim = Claim(path)
    assert claim.try_take() is None
    assert names(path) == ["torn.json"]
    lease = claim.try_take()
    assert lease is not None
    assert (lease.epoch, len(names(path))) == (1, 2)
    lease.release()


def test_checks_say_what_became_of_the_lease(path: Path) -> None:
    lease = take(Claim(path, ttl_s=5.0))
    lease._heart.remove(lease)
    late = lease._renewed_at
    with mock.patch.object(leases, "_now", return_value=late + 5.0):
        lease.check()
        assert lease._renewed_at == late
    with mock.patch.object(leases, "_now", return_value=late + 5.1):
        lease.check()
        assert lease._renewed_at == late + 5.1
    with mock.patch("os.getpid", return_value=1), pytest.raises(LeaseLostError, match="forked"):
        lease.check()
    with mock.patch("os.getpid", return_value=1):
        lease.release()  # of a child: it does nothing
    assert not lease.is_over
    with mock.patch("os.open", side_effect=OSError(errno.EACCES, "Permission denied")):
        with pytest.raises(LeaseLostError, match="cannot be read: Permission denied") as lost:
            lease.check()
        assert str(path) in lost.value.message
        assert lost.value.hint
    with mock.patch("os.utime", side_effect=OSError(errno.EIO, "odd")):
        assert (lease.renew(), lease.is_over) == (False, False)
    with mock.patch("os.utime", side_effect=OSError(errno.ESTALE, "gone")):
        assert (lease.renew(), lease.is_over) == (False, True)
    assert not lease.renew() or lease.is_over
    with pytest.raises(LeaseLostError, match="was released or taken over"):
        lease.check()
    lease.release()
    assert not path.exists()


def test_a_lost_lease_tells_whoever_asked_to_know_and_beats_no_more(path: Path) -> None:
    told: list[Lease] = []
    lease = take(Claim(path, ttl_s=0.2))
    lease.on_lost = lambda: told.append(lease)
    seat.leave(path, lease.owner)
    deadline = time.monotonic() + 10
    while not told:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert lease.is_over
    assert lease not in lease._heart._due_at
    lease.release()


def test_leases_are_renewed_in_the_order_in_which_they_are_due(tmp_path: Path) -> None:
    heart, now = leases._Heart(), [0.0]
    slow, quick = (mock.Mock(beat_s=beat) for beat in (5.0, 2.0))
    heart._thread = mock.Mock()
    with (
        mock.patch.object(leases.time, "monotonic", side_effect=lambda: now[0]),
        mock.patch.object(heart._changed, "wait", lambda seconds: now.__setitem__(0, now[0] + seconds)),
    ):
        heart.add(slow)
        heart.add(quick)
        due = []
        for _ in range(6):
            due.append((heart._next(), now[0]))
    assert due == [
        (quick, 2.0),
        (quick, 4.0),
        (slow, 5.0),
        (quick, 6.0),
        (quick, 8.0),
        (slow, 10.0),
    ] or due == [(quick, 2.0), (quick, 4.0), (slow, 5.0), (quick, 6.0), (quick, 8.0), (quick, 10.0)]
    heart.remove(slow)
    heart.remove(slow)
    heart.remove(quick)
    assert heart._next() is None
    assert heart._thread is None


def test_what_cannot_be_looked_at_is_said_with_its_name(path: Path) -> None:
    path.write_text("a file")
    for ask, verb in ((Claim(path).try_take, "take"), (Claim(path).holder, "read")):
        with pytest.raises(StorageError, match=rf"cannot {verb} the lease .*x\.lease"):
            ask()
