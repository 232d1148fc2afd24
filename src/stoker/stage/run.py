"""Staging, end to end: everything a URL names, to this node, and then you know where it lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from stoker.errors import UsageError
from stoker.redact import redact_url
from stoker.stage.cache import Cache
from stoker.stage.disk.grounds import replace_file
from stoker.stage.near import Near, inode
from stoker.stage.origins.hub import parse_hub
from stoker.stage.plan import Unit, hub_cache_folder, in_order, is_one_file, safe_parts

# Units. With as many files as connections each lands in order and is hashed as it does: on the small machine,
# which others used too, 16 x 128 MiB took 1.9 s to tmpfs and 2.4 s to a disk; 4 at once took 2.3 s and 3.3 s.
_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Staged:
    """What was staged: where it lies, how much it is and how much of it had to be fetched here."""

    url: str
    path: Path
    files: int
    bytes: int
    fetched_bytes: int
    seconds: float
    damaged: tuple[str, ...] = ()  # files that had changed on the disk, and were fetched again


class Watcher:
    """Told how staging goes, from several threads. This one looks away."""

    def planned(self, url: str, units: Sequence[Unit]) -> None: ...
    def began(self, unit: Unit) -> None: ...
    def landed(self, unit: Unit, count: int) -> None: ...
    def waits(self, unit: Unit, holder: str) -> None: ...
    def damaged(self, unit: Unit, names: Sequence[str]) -> None: ...
    def troubled(self, text: str) -> None: ...
    def done(self, unit: Unit) -> None: ...


def fetch(url: str, *, cache: Cache | str | Path | None = None) -> Path:
    """Bring everything that a URL names to this node, once for all who ask; where it lies.

    A file's own path for a single file, else the folder. `cache` is a `Cache`, or the folder of one."""
    if isinstance(cache, Cache):
        return stage(url, cache).path
    with Cache(cache) as own:
        return stage(url, own).path


def stage(
    url: str,
    cache: Cache,
    *,
    choose: Callable[[Near], Iterable[str]] | None = None,
    doubt: Callable[[Unit], Sequence[str]] | None = None,
    watcher: Watcher | None = None,
) -> Staged:
    """Bring what a URL names; with `choose`, only the files it names, in its order. What lies here already is
    believed, unless `doubt` (`cache.shelf.damaged`) names files of it: these are fetched again.

    Files stay pinned until the cache is closed: what this run brought does not give way to what it brings."""
    began = time.monotonic()
    if not cache.is_read_only:
        cache.room.sweep()
    near = cache.at(url)
    units = in_order(near.units, choose(near)) if choose else list(near.units)
    cache.room.check_fits(units)
    run = _Run(near, doubt, watcher or Watcher())
    cache.tell = run.watcher.troubled
    for name in near.collection.left_out:
        run.watcher.troubled(f"left out: {name}")
    run.watcher.planned(redact_url(url), units)
    run.bring_all(units)
    if near.collection.kind == "hub" and cache.hub_cache:
        _write_ref(near)
    return Staged(
        url=redact_url(url),
        path=_place(near),
        files=sum(len(unit.files) for unit in units),
        bytes=sum(unit.bytes for unit in units),
        fetched_bytes=run.fetched_bytes,
        seconds=time.monotonic() - began,
        damaged=tuple(sorted(run.damaged)),
    )


class _Run:
    """Units on their way, a few at a time."""

    def __init__(self, near: Near, doubt: Callable[[Unit], Sequence[str]] | None, watcher: Watcher) -> None:
        self._near, self._cache, self._doubt, self.watcher = near, near.cache, doubt, watcher
        self.fetched_bytes = 0
        self.damaged: list[str] = []

    def bring_all(self, units: Sequence[Unit]) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="stoker-stage") as threads:
            try:
                for future in as_completed([threads.submit(self._bring, unit) for unit in units]):
                    future.result()
            except BaseException:  # one failed, or Ctrl-C: the others end, what has landed stays
                self._cache.stop()
                threads.shutdown(cancel_futures=True)
                raise

    def _bring(self, unit: Unit) -> None:
        self.watcher.began(unit)
        self._cache.pins.add(unit.key)
        self._cache.bring(
            self._near.vouched(unit),
            on_bytes=lambda count: self._landed(unit, count),
            on_wait=lambda holder: self.watcher.waits(unit, holder),
            anew=self._is_damaged(unit),
        )
        self._cache.shelf.touch(unit.key)
        for file in unit.files:
            self._cache.place(unit, file.name)
        self.watcher.done(unit)

    def _is_damaged(self, unit: Unit) -> Callable[[], bool]:
        """Whether what lies here still are the files that were found damaged: others may see to them too."""
        names = self._doubt(unit) if self._doubt and self._cache.shelf.holds(unit) else ()
        if not names:
            return lambda: False
        self.damaged += names
        self.watcher.damaged(unit, names)
        path = self._near.folder / names[0]
        before = inode(path)
        return lambda: inode(path) == before

    def _landed(self, unit: Unit, count: int) -> None:
        self.fetched_bytes += count
        self.watcher.landed(unit, count)


def parse_share(text: str) -> tuple[int, int]:
    """`2/16`: node 2 (of 0 to 15) of 16."""
    try:
        node, nodes = map(int, text.split("/"))
    except ValueError:
        raise UsageError(f"{text!r} is not a share", hint="write node/nodes, as 0/16 for the first") from None
    if not 0 <= node < nodes:
        raise UsageError(
            f"there is no node {node} of {nodes}", hint="the first is 0: of two nodes 0/2, the other 1/2"
        )
    return node, nodes


def _place(near: Near) -> Path:
    return near.folder / near.collection.files[0].name if is_one_file(near.collection) else near.folder


def _write_ref(near: Near) -> None:
    """What huggingface_hub looks up to find the snapshot of a branch or tag."""
    place, commit = parse_hub(near.collection.url), near.collection.revision
    if place.revision != commit:
        path = "/".join([hub_cache_folder(place), "refs", *safe_parts(place.revision or "main")])
        with near.cache.shelf.grounds.made(path.rpartition("/")[0]) as folder:
            replace_file(folder, path.rpartition("/")[2], commit.encode())
