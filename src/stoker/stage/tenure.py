"""A unit's lease and what has landed of it, while this process works on it: opened, published or left.

Two things keep a paused holder that wakes up from doing harm. Its part folder is gone, so its rename finds
nothing; and what it still writes goes into files that its successor has copied, not taken.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stoker.errors import BadShardError, ChangedError, LeaseLostError
from stoker.stage.disk.grounds import remove_tree
from stoker.stage.disk.records import record_bytes
from stoker.stage.disk.room import Room, When
from stoker.stage.disk.shelf import Shelf
from stoker.stage.landing.adopt import adopt_blobs, keep_sound
from stoker.stage.landing.maps import is_part_of
from stoker.stage.landing.part import Part
from stoker.stage.leases.lease import Lease
from stoker.stage.plan import Unit

_LEFT = "left-"  # the owner of such a part has stopped writing
_CHECK_LEASE_S = 1.0


class Tenure:
    """One holder's right to bring one unit. `check` from any thread, the rest from one at a time."""

    def __init__(self, shelf: Shelf, room: Room, unit: Unit, lease: Lease) -> None:
        self._shelf, self._room, self._unit, self._lease = shelf, room, unit, lease
        self._checked_at = time.monotonic()

    def begin(self, when: When) -> Part:
        """Make room, and go on with whatever of it lies here."""
        part = self._room.reserve(self._unit, self._open_part, when=when)
        try:
            adopt_blobs(part, self._shelf.grounds)
            if self._shelf.record(self._unit.key):
                keep_sound(part, self._shelf.grounds)
        except BaseException:
            part.close()
            self._leave(part)
            raise
        return part

    @contextmanager
    def working(self, part: Part) -> Iterator[None]:
        """What happens to a part when work on it ends, one way or another."""
        try:
            yield
        except (ChangedError, BadShardError):
            self._lease.check()
            part.remove()  # what has landed belongs to an object that is no more, or is wrong
            raise
        except OSError as error:
            self._lease.check()  # our folder was taken over: that is what this raises then
            if error.errno == errno.ENOENT and not os.path.lexists(part.folder / "map"):
                # one that held the lease before, and slept, woke up while it was clearing: begin anew
                raise LeaseLostError(f"{part.folder} was taken away", hint="") from error
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                part.remove()
            if error.errno == errno.ENOSPC:
                raise self._room.full(self._unit, self._unit.bytes) from error
            raise
        finally:
            part.close()
            self._leave(part)

    def publish(self, part: Part) -> None:
        self._lease.check()
        self._shelf.add(self._unit, part.publish(record_bytes(self._unit)))
        part.remove()

    def check(self) -> None:
        """Called as bytes arrive: notice, now and then, that another has taken over."""
        if time.monotonic() - self._checked_at > _CHECK_LEASE_S:
            self._checked_at = time.monotonic()
            self._lease.check()

    def release(self) -> None:
        self._lease.release()

    def _open_part(self) -> Part:
        """Go on with what others left: take a dead owner's folder as it is, copy from any other."""
        mine = self._shelf.part_path(self._unit.key, self._lease.owner.token)
        others = [path for path in self._shelf.parts_of(self._unit.key) if is_part_of(path, self._unit)]
        heritage = next(filter(self._is_ended, others), None)
        if heritage:
            os.rename(heritage, mine)
        part = Part(mine, self._unit, grounds=self._shelf.grounds)
        for other in self._shelf.parts_of(self._unit.key):
            if other != mine:
                if self._is_ours(other) or self._is_provable:
                    part.copy_from(other)
                remove_tree(other)
        return part

    def _is_ended(self, folder: Path) -> bool:
        """Whether nobody writes there any more. Another user always could."""
        owner = folder.name.rpartition("~")[2]
        previous = self._lease.previous if self._lease.previous_is_dead else None
        is_left = owner.startswith(_LEFT) or (previous is not None and owner == previous.token)
        return is_left and self._is_ours(folder)

    def _is_ours(self, folder: Path) -> bool:
        facts = folder.lstat()
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid in self._shelf.grounds.mine

    @property
    def _is_provable(self) -> bool:
        """Whether what another user's part says will be checked against the origin's own digest."""
        return bool(self._unit.blocks) or (not self._unit.is_bundle and bool(self._unit.files[0].digest))

    def _leave(self, part: Part) -> None:
        """Nothing writes here any more: say so, that the next one need not copy."""
        with suppress(OSError):
            left = self._shelf.part_path(self._unit.key, _LEFT + self._lease.owner.token)
            os.rename(part.folder, left)
