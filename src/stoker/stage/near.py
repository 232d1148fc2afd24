"""Lazy staging: the files of one collection, brought when first used, or before, in a given order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.stage.disk.room import When
from stoker.stage.foresight import Foresight, fetched_bytes
from stoker.stage.landing.blocks import Blocks, has_blocks
from stoker.stage.landing.digest import is_sound
from stoker.stage.landing.maps import SLICE_BYTES, first_slices
from stoker.stage.origins.origin import Collection
from stoker.stage.plan import BLOCKS, FIRST, Unit, in_order
from stoker.stage.prefetch import Lookahead, Prefetcher

if TYPE_CHECKING:
    from stoker.stage.cache import Cache

_OPEN_FILES = 256
_LOOK_AHEAD = 64  # units
_LOOKS_AT = 256  # units, of tens of microseconds each
_PUBLISHED_S = 0.01  # between looks whether what has landed has its name


class Near:
    """A collection in a cache. Any thread. What `local_path` gave stays until `release` or `close`."""

    def __init__(self, cache: Cache, collection: Collection, units: Sequence[Unit], *, folder: Path) -> None:
        self.cache, self.collection, self.units, self.folder = cache, collection, units, folder
        self._unit_of = {file.name: unit for unit in units for file in unit.files}
        self._held: dict[str, Path] = {}
        self._pinned: set[str] = set()  # units that were read before they were whole
        self._by_key = {unit.key: unit for unit in units}
        self.foresight = Foresight()
        self._to_come = deque(units)  # of what is read here: those not seen whole yet
        self._elsewhere = deque(units)  # of all there is
        self.predicted_bytes = 0  # that will be fetched in this epoch, where not all fits the budget
        self._waiting = 0  # readers, for what comes now
        self._is_read_here, self._is_closing = True, False
        self._prefetcher: Prefetcher | Lookahead | None = None
        self._blocks: Blocks | None = None
        self._lock, self._reading_blocks = threading.Lock(), threading.Lock()

    @property
    def open_files(self) -> int:
        """How many files a reader may keep open: none where not all that it reads fits the budget, so that
        what is needed last can give way."""
        if not self.cache.room.is_limited:
            return _OPEN_FILES
        keys = set(self.foresight.uses)
        total = sum(unit.bytes for unit in self.units if unit.key in keys or not keys)
        return _OPEN_FILES if self.cache.room.fits(total) else 0

    @property
    def is_coming(self) -> bool:
        """Whether some of what is read here is not whole yet, or may give way to others."""
        return not self.open_files or self._lack(self._to_come, looks=_LOOKS_AT)

    @property
    def is_here(self) -> bool:
        """Whether all of the collection lies here, and stays: in which order it is read does not matter."""
        return not self.cache.room.is_limited and not self._lack(self._elsewhere, looks=len(self._elsewhere))

    def _lack(self, units: deque[Unit], *, looks: int) -> bool:
        """Whether some of these are not whole yet; those that are need not be looked at again."""
        for _ in range(min(len(units), looks)):
            if not self.cache.shelf.holds(units[0]):
                break
            units.popleft()
        return bool(units)

    def local_path(self, name: str) -> Path:
        """Where a file lies on this node; fetched, or waited for, if it does not yet."""
        self.cache.check_process()
        (unit,) = in_order(self.units, [name]) if name not in self._unit_of else (self._unit_of[name],)
        if (held := self._held.get(name)) and held.exists():
            self.foresight.used(unit.key)
            return held
        self.cache.pins.add(unit.key)  # pinned first, looked for second: see Room
        self.foresight.used(unit.key)  # its next turn may be far away: held by now, it stays
        try:
            self._bring_now(unit)
            if not unit.is_bundle:  # a reader of whole files has no first batch to wait for
                self.cache.through.go()
            self.cache.shelf.touch(unit.key)
            path = self.cache.place(unit, name)
        except BaseException:
            self.cache.pins.drop(unit.key)
            raise
        with self._lock:
            if name in self._held:  # another thread was quicker, and its pin is enough
                self.cache.pins.drop(unit.key)
            return self._held.setdefault(name, path)

    def within(self, name: str, start: int, stop: int) -> tuple[Path, bool]:
        """Where these bytes of a file lie, which come before others; and whether the whole file does. One
        that is still landing is there for a moment: it is moved to its name when it is whole."""
        unit = self._unit_of.get(name)
        if unit is None or name in self._held or not self._reads_through or self.cache.shelf.holds(unit):
            return self.local_path(name), True
        unit = self._with_blocks(unit)
        if not unit.blocks:
            return self.local_path(name), True
        number = [file.name for file in unit.files].index(name)
        self._pin(unit.key)
        first = first_slices(unit)[number]
        slices = range(first + start // SLICE_BYTES, first - -stop // SLICE_BYTES)
        path = self.cache.reach(unit, number, slices, gives_up=lambda: self._is_closing)
        return (path, False) if path else (self.local_path(name), True)

    def _pin(self, key: str) -> None:
        """Until all is closed: another version of it has to go elsewhere."""
        with self._lock:
            if key not in self._pinned:
                self.cache.pins.add(key)
                self._pinned.add(key)

    @property
    def _reads_through(self) -> bool:
        """Whether files can be read before they are whole: their blocks have digests, and there is room for
        all of them, so that none has to give way."""
        return has_blocks(self.collection) and not self.cache.is_read_only and self.open_files > 0

    def _bring_now(self, unit: Unit) -> None:
        while self._comes_in_pieces(unit):  # all of them are wanted now, before what nobody waits for
            if self.cache.reach(self._with_blocks(unit), 0, range(first_slices(unit)[-1])):
                time.sleep(_PUBLISHED_S)
        with self._lock:
            self._waiting += 1
        try:
            self.cache.bring(self.vouched(unit), when=When(next_use=self.cache.distance))
        finally:
            with self._lock:
                self._waiting -= 1
            if self._prefetcher:
                self._prefetcher.moved_on()

    def _comes_in_pieces(self, unit: Unit) -> bool:
        """Whether it is read through, by this process or soon by whoever brings what is told to follow."""
        if self.cache.through.is_open(unit.key):
            return True
        if unit.is_bundle or not self._reads_through or self.cache.shelf.holds(unit):
            return False
        return bool(self._with_blocks(unit).blocks)

    def vouched(self, unit: Unit) -> Unit:
        """The unit, with the digests of its slices where there are such: these are brought first then."""
        return unit if unit.is_bundle or self.cache.shelf.holds(unit) else self._with_blocks(unit)

    def _with_blocks(self, unit: Unit) -> Unit:
        names = [file.name for file in unit.files]
        if not has_blocks(self.collection) or any(name in FIRST for name in names):
            return unit
        with self._reading_blocks:
            if self._blocks is None:
                self._blocks = Blocks(self.collection, self.local_path(BLOCKS))
        return replace(unit, blocks=self._blocks.of(names))

    def release(self, name: str) -> None:
        """This process does not read the file any more: it may be evicted."""
        with self._lock:
            if self._held.pop(name, None) is None:
                return
            unit = self._unit_of[name]
            self.cache.shelf.touch(unit.key)
            self.cache.pins.drop(unit.key)
        if self._prefetcher:
            self._prefetcher.moved_on()

    def prefetch(self, names: Iterable[str] = ()) -> None:
        """Begin to bring these files in this order (default: all), in the background; what an earlier call
        has not begun yet gives way. A name may come again: with a budget, what is needed last gives way
        first, and what will be needed again comes again."""
        self.cache.check_process()
        names = list(names) or [file.name for unit in self.units for file in unit.files]
        units = in_order(self.units, names)
        reading = {self._unit_of[name].key for name in self._held}
        self.foresight = Foresight([self._unit_of[name].key for name in names], reading=reading)
        self._to_come = deque(units)
        if self.cache.room.is_limited and not self._reads_through:
            self._check_budget(units)
            self._prefetcher = self._prefetcher or Lookahead(self._next_unit, self._bring_ahead)
            self._prefetcher.moved_on()
            return
        if self._reads_through:
            pieces = [unit for unit in units if not any(file.name in FIRST for file in unit.files)]
            self.cache.through.follow(self, pieces, self._with_blocks)
            units = [unit for unit in units if unit not in pieces]
        if not isinstance(self._prefetcher, Prefetcher):
            self._prefetcher = Prefetcher(self._bring_ahead)
        self._prefetcher.follow(units)

    def _check_budget(self, units: Sequence[Unit]) -> None:
        """Say how much will be fetched where not all of it fits, and refuse what would thrash."""
        total, room = sum(unit.bytes for unit in units), self.cache.room
        first = sum(unit.bytes for unit in self.units if unit.files[0].name in FIRST)
        if room.fits(total + first):
            return
        sizes = {unit.key: unit.bytes for unit in units}
        here = [unit.key for unit in units if self.cache.shelf.holds(unit)]
        self.predicted_bytes = fetched_bytes(
            self.foresight.uses, sizes, budget=room.budget_bytes - first, here=here
        )
        room.check_thrash(self.predicted_bytes, total, url=self.collection.url, most=self.cache.refetch)

    def _next_unit(self) -> Unit | None:
        """What is needed next and does not lie here; nothing while somebody waits: that comes first."""
        if self._waiting or not self._is_read_here:
            return None
        for key in self.foresight.coming(_LOOK_AHEAD):
            unit = self._by_key[key]
            if not self.cache.shelf.holds(unit):
                return unit
        return None

    def _bring_ahead(self, unit: Unit) -> None:
        when = When(is_now=False, next_use=self.cache.distance, foreseen=self.cache.foresees)
        self.cache.bring(self.vouched(unit), when=when)

    def refetch(self, name: str, *, damaged: int) -> None:
        """Bring a file again, if what lies there still is the inode that was found damaged: another
        process may have seen to it already."""
        unit, path = self._unit_of[name], self.folder / name
        if self._held.get(name, path) != path:  # read from memory: go on from the disk, if that is sound
            self._held[name] = path
            file = next(file for file in unit.files if file.name == name)
            damaged = 0 if is_sound(path, file.digest) else inode(path)
        if not self.cache.shelf.holds(unit):  # found damaged before it was whole: it keeps its inode
            self._bring_now(unit)
        unit = unit if unit.is_bundle else self._with_blocks(unit)
        self.cache.bring(unit, anew=lambda: inode(path) == damaged)

    def stop(self) -> None:
        """Make reads that wait for bytes fail soon: nobody wants them any more. `close` comes next."""
        self._is_closing = True
        self.cache.through.wake()

    def close(self) -> None:
        """End prefetching and let go of every file; safe twice. The cache must have been told to stop if
        fetching is not to be waited for."""
        if self._prefetcher:
            self._prefetcher.close()
        self.cache.through.forget(self)
        for name in list(self._held):
            self.release(name)
        for key in self._pinned:
            self.cache.pins.drop(key)
        self._pinned.clear()
        self._is_closing = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._is_read_here = False  # but where this goes: there it is seen how far the reader is
        return _reopen, (self.cache, self.collection, self.foresight.uses)


def _reopen(cache: Cache, collection: Collection, uses: Sequence[str]) -> Near:
    near = cache.at(collection)
    near.foresight = Foresight(uses)
    return near


def inode(path: Path) -> int:
    """Which file this is, whatever its name; 0 for none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
