"""The files of one collection, near: brought when they are first used, or before, in a given order."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.stage.blocks import Blocks, has_blocks
from stoker.stage.digest import is_sound
from stoker.stage.plan import BLOCKS, FIRST, Unit, in_order
from stoker.stage.prefetch import AT_ONCE, Prefetcher
from stoker.wire.origin import Collection

if TYPE_CHECKING:
    from stoker.stage.cache import Cache

_OPEN_FILES = 256


class Near:
    """A collection in a cache. Any thread. What `local_path` gave stays until `release` or `close`."""

    def __init__(self, cache: Cache, collection: Collection, units: Sequence[Unit], *, folder: Path) -> None:
        self.cache, self.collection, self.units, self.folder = cache, collection, units, folder
        self._unit_of = {file.name: unit for unit in units for file in unit.files}
        self._held: dict[str, Path] = {}
        self._asked: set[str] = set()
        self._ahead: set[str] = set()  # units brought before they were asked for
        self._prefetcher: Prefetcher | None = None
        self._blocks: Blocks | None = None
        self._lock, self._reading_blocks = threading.Lock(), threading.Lock()

    @property
    def open_files(self) -> int:
        """How many files a reader may keep open: with a budget, so few that others can give way."""
        largest = max((unit.bytes for unit in self.units), default=0)
        return self.cache.room.fit(largest, most=_OPEN_FILES)

    def local_path(self, name: str) -> Path:
        """Where a file lies on this node; fetched, or waited for, if it does not yet."""
        self.cache.check_process()
        if (held := self._held.get(name)) and held.exists():
            return held
        (unit,) = in_order(self.units, [name]) if name not in self._unit_of else (self._unit_of[name],)
        self._asked.add(unit.key)
        self._ahead.discard(unit.key)
        self.cache.pins.add(unit.key)  # pinned first, looked for second: see Room
        try:
            self.cache.bring(self.vouched(unit))
            self.cache.shelf.touch(unit.key)
            path = self.cache.place(unit, name)
        except BaseException:
            self.cache.pins.drop(unit.key)
            raise
        with self._lock:
            if name in self._held:  # another thread was quicker, and its pin is enough
                self.cache.pins.drop(unit.key)
            return self._held.setdefault(name, path)

    def vouched(self, unit: Unit) -> Unit:
        """The unit, with the digests of its slices where there are such: these are brought first then."""
        name = unit.files[0].name
        if unit.is_bundle or name in FIRST or not has_blocks(self.collection) or self.cache.shelf.holds(unit):
            return unit
        with self._reading_blocks:
            if self._blocks is None:
                self._blocks = Blocks(self.collection, self.local_path(BLOCKS))
        return replace(unit, blocks=self._blocks.of(name))

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
        has not begun yet gives way."""
        self.cache.check_process()
        units = in_order(self.units, names) if (names := list(names)) else list(self.units)
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(
                self._bring_ahead,
                # where room is short, none may take what the one before it needs
                at_once=1 if self.cache.room.is_limited else AT_ONCE,
            )
        self._prefetcher.follow(units)

    def _bring_ahead(self, unit: Unit) -> None:
        self.cache.bring(self.vouched(unit), ahead=frozenset(self._ahead))
        if unit.key not in self._asked:
            self._ahead.add(unit.key)

    def refetch(self, name: str, *, damaged: int) -> None:
        """Bring a file again, if what lies there still is the inode that was found damaged: another
        process may have seen to it already."""
        unit, path = self._unit_of[name], self.folder / name
        if self._held.get(name, path) != path:  # read from memory: go on from the disk, if that is sound
            self._held[name] = path
            file = next(file for file in unit.files if file.name == name)
            damaged = 0 if is_sound(path, file.digest) else inode(path)
        self.cache.bring(self.vouched(unit), anew=lambda: inode(path) == damaged)

    def close(self) -> None:
        """End prefetching and let go of every file; safe twice. The cache must have been told to stop if
        fetching is not to be waited for."""
        if self._prefetcher:
            self._prefetcher.close()
        for name in list(self._held):
            self.release(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.cache, self.collection)


def _reopen(cache: Cache, collection: Collection) -> Near:
    return cache.at(collection)


def inode(path: Path) -> int:
    """Which file this is, whatever its name; 0 for none."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
