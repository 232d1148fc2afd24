"""Lease files and their atomic operations: the few calls that decide.

A lease is a small folder, `X.lease`, beside the thing it guards:

    seat-7-3f9c…      one empty file whose name says who sits: epoch and token
    3f9c….json        the record of that owner; its mtime is the heartbeat

Each step that decides is one call that the kernel, or the NFS server, answers alone; and what it names is
never named again, so that whoever slept before the call cannot hit a successor:

    found       make a folder `X.lease.TOKEN.new` with record and seat and rename it to `X.lease`, which
                fails while there is one that is not empty
    take over   write a record, rename `seat-7-OLD` to `seat-8-NEW`: one rename wins, the others find no
                `seat-7-OLD`; then remove the old record
    leave       remove seat, record and folder, which again fails unless it is empty

What a listing or a stat shows may be old on NFS; it only ever leads to a call that then fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from stoker.machine.mounts import mounts_of
from stoker.stage.leases.owner import Owner

_NEW = ".new"
_OWN_DISKS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "tmpfs")
GONE = (errno.ENOENT, errno.ESTALE)
_FOREIGN = (errno.ELOOP, errno.ENXIO, errno.EISDIR)  # a link, a FIFO or a folder in the place of a record
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_IN_USE = (errno.ENOTEMPTY, errno.EEXIST)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a lease's folder shows at one moment; equal views mean that nothing moved."""

    folder: int  # its inode
    names: tuple[str, ...] = field(compare=False)
    seat: str = ""
    owner: Owner | None = None  # unknown if the record is torn or missing
    beat_ns: int = 0

    @property
    def epoch(self) -> int:
        return _epoch(self.seat)

    @property
    def token(self) -> str:
        return self.seat.rpartition("-")[2]


@contextmanager
def unless_gone() -> Iterator[None]:
    """Leave the block where what it names is not there any more; any other error is raised."""
    try:
        yield
    except OSError as error:
        if error.errno not in GONE:
            raise


@contextmanager
def _unless_foreign() -> Iterator[None]:
    """Leave the block where what lies there is no file of ours."""
    try:
        yield
    except OSError as error:
        if error.errno not in _FOREIGN:
            raise


@contextmanager
def opened(path: Path) -> Iterator[int | None]:
    """A folder to work in by descriptor: if it is removed and made anew, we do not follow its name."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in GONE:
            raise
        yield None
        return
    try:
        yield folder
    finally:
        os.close(folder)


def look(folder: int) -> View | None:
    """What an open lease folder shows; None if it was removed meanwhile."""
    view = _view(folder)
    if view is not None and view.owner is None:
        look_anew(folder)
        view = _view(folder)
    return view


def look_anew(folder: int | Path) -> None:
    """Make an NFS client ask its server for what is in a folder, by touching it.

    Else it may remember for half a minute which names are there, and which are not.
    """
    with suppress(OSError):
        os.utime(folder) if isinstance(folder, int) else os.utime(folder, follow_symlinks=False)


def found(path: Path, owner: Owner) -> bool:
    """Sit down where nobody has a seat; False if another was quicker."""
    new = path.with_name(f"{path.name}.{owner.token}{_NEW}")
    furnished = won = False
    try:
        new.mkdir(parents=True)
        if _is_a_groups(new.parent):
            new.chmod(0o2770)  # any member may take over from another, whatever the umask says
        with opened(new) as folder:
            furnished = folder is not None and _furnish(folder, owner)
        won = furnished and _rename_folder(new, path, seat=_seat(owner))
    finally:
        if not won:
            _discard(new)
    return won


def take_over(folder: int, view: View, owner: Owner) -> bool:
    """Take the seat that the view shows; False if another was quicker."""
    mine = (record_name(owner.token), _seat(owner))
    try:
        _write(folder, mine[0], owner.to_json())
        won = _rename_seat(folder, view.seat, mine[1])
        if won:
            # Only when no other record is left is the lease ours alone: a record is what a holder checks.
            remove(folder, {*view.names, record_name(view.token)} - {view.seat})
    except OSError as error:
        remove(folder, mine)
        if error.errno not in GONE:
            raise
        return False
    if not won:
        remove(folder, mine)
    return won


def leave(path: Path, owner: Owner) -> None:
    """Give up the seat, if it is still ours, and leave nothing behind."""
    with opened(path) as folder:
        if folder is not None:
            # The seat first: if we die in between, what is left is known to be nobody's.
            remove(folder, (_seat(owner),))
            remove(folder, (record_name(owner.token),))
    remove_folder(path)


def remove(folder: int, names: Iterable[str]) -> None:
    # An NFS client keeps a removed file that somebody here has open as `.nfs…`, and removes it itself.
    for name in names:
        if not name.startswith(".nfs"):
            with unless_gone():
                os.unlink(name, dir_fd=folder)


def remove_folder(path: Path) -> None:
    """Remove it if it is empty; if it is not, it is in use."""
    with suppress(OSError):
        path.rmdir()


def remove_leftovers(path: Path) -> None:
    """Remove folders in which founders of this lease, or dead ones of its neighbours, meant to start.

    Whoever still works in one has lost, or finds it gone and tries again.
    """
    with suppress(OSError):
        for new in path.parent.glob(f"*{_NEW}"):
            if new.name.startswith(f"{path.name}.") or _is_abandoned(new):
                _discard(new)


def record_name(token: str) -> str:
    return f"{token}.json"


def _seat(owner: Owner) -> str:
    return f"seat-{owner.epoch}-{owner.token}"


def _epoch(name: str) -> int:
    """The epoch in a seat's name; 0 for any other name."""
    kind, _, rest = name.partition("-")
    number = rest.partition("-")[0]
    return int(number) if kind == "seat" and number.isdecimal() and len(number) < 10 else 0


def _view(folder: int) -> View | None:
    with unless_gone():
        names, inode = tuple(os.listdir(folder)), os.fstat(folder).st_ino
        seat = max((name for name in names if _epoch(name)), key=_epoch, default="")
        owner, beat_ns = _read_record(folder, seat.rpartition("-")[2]) if seat else (None, 0)
        return View(folder=inode, names=names, seat=seat, owner=owner, beat_ns=beat_ns)
    return None


def _read_record(folder: int, token: str) -> tuple[Owner | None, int]:
    """An owner and its last heartbeat, as the server has them now: open() asks it, stat() may not."""
    with unless_gone(), _unless_foreign():
        handle = os.open(record_name(token), READ_FLAGS, dir_fd=folder)
        try:
            owner = Owner.from_json(os.read(handle, 1 << 16))
            is_whole = owner is not None and owner.token == token
            return owner if is_whole else None, os.fstat(handle).st_mtime_ns
        finally:
            os.close(handle)
    return None, 0


def _is_a_groups(folder: Path) -> bool:
    """Whether a group shares this folder, and each keeps what is its own: setgid, sticky, group writes."""
    return folder.stat().st_mode & 0o3020 == 0o3020


def is_on_own_disk(folder: int) -> bool:
    """Whether an open folder lies on a filesystem that no other running kernel can have mounted."""
    device = os.fstat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = mounts_of(Path("/proc/self/mountinfo").read_text())
    except (OSError, ValueError):
        return False
    return any(mount.device == number and mount.filesystem in _OWN_DISKS for mount in mounts)


def _furnish(folder: int, owner: Owner) -> bool:
    """Put record and seat into a folder of our own; False if somebody swept it meanwhile."""
    with unless_gone():
        _write(folder, record_name(owner.token), owner.to_json())
        _write(folder, _seat(owner), b"")
        return True
    return False


def _write(folder: int, name: str, content: bytes) -> None:
    """A new file, closed at once: that is when NFS shows its content to others."""
    handle = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644, dir_fd=folder)
    try:
        if os.fstat(folder).st_mode & 0o020:
            os.fchmod(handle, 0o640)  # others of the group must be able to read it
        os.write(handle, content)
    finally:
        os.close(handle)


def _rename_folder(new: Path, path: Path, *, seat: str) -> bool:
    try:
        new.rename(path)
    except OSError as error:
        if error.errno not in (*GONE, *_IN_USE):
            raise
        return error.errno in GONE and os.path.lexists(path / seat)  # done, but the answer was lost
    return True


def _rename_seat(folder: int, old: str, new: str) -> bool:
    try:
        os.rename(old, new, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
        if error.errno not in GONE:
            raise
        return error.errno == errno.ENOENT and new in os.listdir(folder)  # done, but the answer was lost
    return True


def _discard(new: Path) -> None:
    """Remove a founder's folder, whoever else does so at this moment.

    Only the files that it was made with: an NFS client that remembers the name for longer than it holds
    would open by it the lease that the folder has become.
    """
    token = new.name.removesuffix(_NEW).rpartition(".")[2]
    with suppress(OSError), opened(new) as folder:
        if folder is not None:
            remove(folder, (record_name(token), f"seat-1-{token}"))
            new.rmdir()


def _is_abandoned(new: Path) -> bool:
    with opened(new) as folder:
        view = None if folder is None else _view(folder)
    return view is not None and view.owner is not None and view.owner.is_dead()
