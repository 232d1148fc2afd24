"""`Cache`: a folder on this node into which files come once, whoever asks.

    with stoker.Cache("/nvme/stoker", budget="2TB") as cache:
        corpus = cache.at("s3://bucket/corpus")
        corpus.local_path("shard-00001.bin")  # fetched on first use, or waited for

Any number of processes and containers may share the folder. What a living reader holds is never evicted.

A forked child cannot go on with its parent's cache: the object-store client and its threads did not come
along, and would hang. Start processes with the spawn method; a cache, and what `at` gives, can be sent to
them.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from stoker.errors import StorageError, UsageError
from stoker.formats.sizes import parse_size
from stoker.options import check_choices, given, takes
from stoker.stage.disk.grounds import Grounds, own_folder
from stoker.stage.disk.pins import NoPins, Pins
from stoker.stage.disk.room import NOW, Room, When
from stoker.stage.disk.shelf import Shelf
from stoker.stage.fetch import Fetcher, Stopped
from stoker.stage.near import Near
from stoker.stage.origins.origin import Collection, resolve
from stoker.stage.plan import Unit, content_digest, folder_of, is_one_file, units_of
from stoker.stage.preload import Preload, make_preload
from stoker.stage.through.scheduler import ReadThrough
from stoker.stage.wire.wire import Wire
from stoker.storage import is_local, named_errors
from stoker.storage import local_path as path_behind

TTL_S = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheOptions:
    """The options of `Cache`: to add one, add a field."""

    folder: Annotated[
        str | Path | None,
        "where files lie; none: $STOKER_CACHE, else a folder of this user's under the temporary one",
    ] = field(default=None, kw_only=False)
    budget: Annotated[
        str | int,
        'bytes the folder may hold ("2TB"); beyond it the longest unused files give way. 0: no limit, and '
        "nothing is ever evicted",
    ] = 0
    limit_rate: Annotated[
        str | int, "bytes per second that this process takes from the network; 0: no limit"
    ] = 0
    preload: Annotated[
        Literal["", "page-cache", "shm"], "also bring files into memory, as far as they fit what is free"
    ] = ""
    keep_in_memory: Annotated[bool, "leave in /dev/shm what was preloaded, for a job that begins later"] = (
        False
    )
    past_cache: Annotated[
        bool, "write large files of datasets past the page cache: for what is not read at once"
    ] = False
    refetch: Annotated[
        float, "how many times its bytes an epoch may fetch where the budget does not hold them all"
    ] = 2.0
    shared: Annotated[
        bool,
        "the folder is a group's (mode 3770): what its members staged is used where its digest is right, and "
        "its owner is trusted",
    ] = False
    hub_cache: Annotated[bool, "lay hub repositories out as the Hugging Face cache does"] = False
    ttl_s: Annotated[float, "silence after which a process on another node counts as gone"] = TTL_S

    def __post_init__(self) -> None:
        check_choices(self)
        if not isinstance(self.folder, (str, os.PathLike, type(None))):  # True would be a folder called True
            raise UsageError(f"{self.folder!r} is not a folder for a cache", hint="give its path, or nothing")
        if not self.ttl_s > 0:
            raise UsageError(
                f"ttl_s={self.ttl_s!r} lets nobody hold a lease", hint="give some seconds, as 10"
            )


class Cache:
    """Files near the GPU. Any thread; `close` (or use as a context manager) ends its threads."""

    @takes(CacheOptions, of="a cache")
    def __init__(self, options: CacheOptions) -> None:
        self._options, self._ttl_s = options, options.ttl_s
        self.folder = path_behind(options.folder).absolute() if options.folder else default_folder()
        self.hub_cache, self.refetch = options.hub_cache, options.refetch
        with named_errors("make the cache folder", self.folder):
            self.shelf = Shelf(Grounds.of(self.folder, shared=options.shared))
            self.room = Room(self.shelf, budget_bytes=parse_size(options.budget), ttl_s=self._ttl_s)
        self.is_read_only = not os.access(self.folder, os.W_OK)
        self.pins = NoPins() if self.is_read_only else self._make_pins()
        self.tell: Callable[[str], None] = lambda text: None  # a person, what is being waited for
        self._wire = Wire(limit_rate=parse_size(options.limit_rate), tell=lambda text: self.tell(text))
        self._fetcher = Fetcher(
            self.shelf, self.room, self._wire, ttl_s=self._ttl_s, past_cache=options.past_cache
        )
        # what is waited for does not queue behind what is not, unless both must keep to one rate
        self._urgent = Wire(tell=lambda text: self.tell(text)) if not options.limit_rate else self._wire
        self.through = ReadThrough(self._fetcher, urgent=self._urgent)
        self._memory: Preload | None = None
        self._coming: dict[str, Future[None]] = {}
        self._near: list[Near] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def _make_pins(self) -> Pins:
        return Pins(self.shelf.pins_folder(), ttl_s=self._ttl_s, purpose="reading")

    def at(self, url: str | Path | Collection) -> Near:
        """The files of a dataset, folder, hub repository or single file, brought near as they are used."""
        self.check_process()
        found = url if isinstance(url, Collection) else resolve(_absolute(url))
        if found.kind == "folder" and is_local(found.url) and _is_within(self.folder, Path(found.url)):
            raise UsageError(
                f"the cache {self.folder} lies in {found.url}, and would be staged into itself",
                hint="choose a cache folder elsewhere, or stage a folder below",
            )
        folder = self._folder_for(found)
        near = Near(self, found, units_of(found, folder=folder), folder=self.folder / folder)
        self._near.append(near)
        return near

    def _folder_for(self, found: Collection) -> str:
        """Where a collection goes. While somebody reads another version of it there, this one goes beside it:
        `corpus@1f3a…`, and stays there."""
        folder = folder_of(found, hub_cache=self.hub_cache)
        if found.kind == "hub":  # whose folders are commits
            return folder
        beside = f"{folder}@{content_digest(found)}"
        if any(map(self.shelf.holds, units_of(found, folder=beside))):
            return beside
        others = self.shelf.other_versions(found.files, folder)
        return beside if others and self.room.are_read(others) else folder

    def local_path(self, url: str | Path) -> Path:
        """One file, by its own URL, on this node."""
        near = self.at(url)
        if not is_one_file(near.collection):
            raise UsageError(f"{url} is not one file", hint="use `cache.at(url)` for a dataset or a folder")
        return near.local_path(near.collection.files[0].name)

    def bring(
        self,
        unit: Unit,
        *,
        on_bytes: Callable[[int], None] = lambda count: None,
        on_wait: Callable[[str], None] = lambda holder: None,
        when: When = NOW,
        anew: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when a unit lies here. Threads of one process that want the same wait for the first.

        `when`: whether the unit is needed now, and when others are."""
        self.check_process()
        while anew() or not self.shelf.holds(unit):
            if self.is_read_only:
                raise StorageError(
                    f"{unit.files[0].url} does not lie in {self.folder}, which cannot be written to",
                    hint="stage it from where the folder can be written, or choose another cache folder",
                )
            with self._lock:
                coming, mine = self._coming.get(unit.key), Future[None]()
                if coming is None:
                    self._coming[unit.key] = mine
            if coming is not None:
                coming.exception()  # whatever it met, it may be another matter for us
                continue
            try:
                with _closed_meanwhile():
                    self._fetcher.bring(unit, on_bytes=on_bytes, on_wait=on_wait, when=when, anew=anew)
            finally:
                with self._lock:
                    del self._coming[unit.key]
                mine.set_result(None)
            return

    def reach(
        self, unit: Unit, number: int, slices: range, *, gives_up: Callable[[], bool] = lambda: False
    ) -> Path | None:
        """Return when these slices of one of its files have landed: where, until the unit is whole; None when
        it is. An error, soon after whoever waits `gives_up`."""
        self.check_process()
        with _closed_meanwhile():
            return self.through.reach(unit, number, slices, gives_up)

    def distance(self, key: str, beyond: float = -math.inf) -> float:
        """How far away the next use of a unit is, or the first beyond some distance, for whoever reads here;
        infinite if nobody knows of one."""
        return min((near.foresight.distance(key, beyond=beyond) for near in self._near), default=math.inf)

    def foresees(self, key: str) -> bool:
        """Whether somebody who reads here has told of a unit: who does not is another job."""
        return any(near.foresight.foresees(key) for near in self._near)

    def place(self, unit: Unit, name: str) -> Path:
        """Where to read a file that lies here: in memory where preloading was asked for and it fits."""
        with self._lock:
            if self._memory is None:
                self._memory = make_preload(
                    self._options.preload, ttl_s=self._ttl_s, keep=self._options.keep_in_memory
                )
        return self._memory.path(unit, name, root=self.folder)

    def check_process(self) -> None:
        if self._closed:
            raise UsageError("the cache is closed", hint="make another")
        if os.getpid() != self._pid:
            raise StorageError(
                f"the cache {self.folder} was opened before this process was forked, and would hang here",
                hint="start worker processes with the 'spawn' method, or open the cache in the child",
            )

    def stop(self) -> None:
        """Make everything that fetches end soon; what has landed stays for the next one."""
        self._fetcher.stop()
        self.through.stop()
        self._urgent.close()
        self._wire.close()

    def close(self) -> None:
        """Let go of everything that is held; safe twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self.stop()
        self.through.close()
        for near in self._near:
            near.close()
        self._closed = True
        if self._memory:
            self._memory.close()
        self.pins.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (replace(self._options, folder=self.folder),)


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$STOKER_CACHE, else a folder under the temporary one that is this user's alone."""
    if folder := environ.get("STOKER_CACHE"):
        return path_behind(folder).absolute()
    path = Path(tempfile.gettempdir()) / f"stoker-cache-{os.getuid()}"
    return own_folder(path, hint="set STOKER_CACHE to a folder of yours")


@contextmanager
def _closed_meanwhile() -> Iterator[None]:
    try:
        yield
    except Stopped:
        raise StorageError("the cache was closed while it was used", hint="close it last") from None


def _reopen(options: CacheOptions) -> Cache:
    return Cache(**given(options, CacheOptions))


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _absolute(url: str | Path) -> str:
    if not str(url).strip():  # else it would be the working folder, with all that lies there
        raise UsageError("the URL is empty", hint="a variable in the command may not be set")
    return str(path_behind(url).absolute()) if is_local(url) else str(url)
