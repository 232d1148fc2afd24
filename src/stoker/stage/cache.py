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

import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from collections.abc import Collection as Names
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

from stoker.errors import StorageError, UsageError
from stoker.formats.sizes import parse_size
from stoker.stage.fetch import Fetcher, Stopped
from stoker.stage.near import Near
from stoker.stage.pins import Pins
from stoker.stage.plan import Unit, folder_of, is_one_file, units_of
from stoker.stage.preload import PRELOADS, Preload, make_preload
from stoker.stage.room import Room
from stoker.stage.shelf import Shelf, own_folder
from stoker.storage import is_local, named_errors
from stoker.storage import local_path as path_behind
from stoker.wire.origin import Collection, resolve
from stoker.wire.wire import Wire

TTL_S = 10.0


class Cache:
    """Files near the GPU. Any thread; `close` (or use as a context manager) ends its threads.

    folder      where files lie; default: $STOKER_CACHE, else a folder of this user's under the temporary one
    budget      bytes the folder may hold ("2TB"); beyond it the longest unused files give way. 0: no limit,
                and nothing is ever evicted
    limit_rate  bytes per second that this process takes from the network; 0: no limit
    preload     "page-cache" or "shm": also bring files into memory, as far as they fit what is free
    past_cache  write large files of datasets past the page cache: for what is not read at once
    keep_in_memory  leave in /dev/shm what was preloaded, for a job that begins later
    hub_cache   lay hub repositories out as the Hugging Face cache does
    ttl_s       silence after which a process on another node counts as gone
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        budget: str | int = 0,
        limit_rate: str | int = 0,
        preload: str = "",
        hub_cache: bool = False,
        keep_in_memory: bool = False,
        past_cache: bool = False,
        ttl_s: float = TTL_S,
    ) -> None:
        if preload not in PRELOADS:
            raise UsageError(f"preload={preload!r} is unknown", hint="use 'page-cache' or 'shm'")
        if not isinstance(folder, (str, os.PathLike, type(None))):  # cache=True would be a folder called True
            raise UsageError(f"{folder!r} is not a folder for a cache", hint="give its path, or nothing")
        if not ttl_s > 0:
            raise UsageError(f"ttl_s={ttl_s!r} lets nobody hold a lease", hint="give some seconds, as 10")
        self._options: dict[str, Any] = {  # to be made again in another process
            "budget": budget,
            "limit_rate": limit_rate,
            "preload": preload,
            "hub_cache": hub_cache,
            "keep_in_memory": keep_in_memory,
            "past_cache": past_cache,
            "ttl_s": ttl_s,
        }
        self.folder = path_behind(folder).absolute() if folder else default_folder()
        self.hub_cache, self._ttl_s = hub_cache, ttl_s
        with named_errors("make the cache folder", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.shelf = Shelf(self.folder)
            self.room = Room(self.shelf, budget_bytes=parse_size(budget), ttl_s=ttl_s)
        self.pins = Pins(self.shelf.pins_folder(), ttl_s=ttl_s, purpose="reading")
        self._wire = Wire(limit_rate=parse_size(limit_rate))
        self._fetcher = Fetcher(self.shelf, self.room, self._wire, ttl_s=ttl_s, past_cache=past_cache)
        self._preload, self._keep = preload, keep_in_memory
        self._memory: Preload | None = None
        self._coming: dict[str, Future[None]] = {}
        self._near: list[Near] = []
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._closed = False

    def at(self, url: str | Path | Collection) -> Near:
        """The files of a dataset, folder, hub repository or single file, brought near as they are used."""
        self.check_process()
        found = url if isinstance(url, Collection) else resolve(_absolute(url))
        if found.kind == "folder" and is_local(found.url) and _is_within(self.folder, Path(found.url)):
            raise UsageError(
                f"the cache {self.folder} lies in {found.url}, and would be staged into itself",
                hint="choose a cache folder elsewhere, or stage a folder below",
            )
        folder = folder_of(found, hub_cache=self.hub_cache)
        near = Near(self, found, units_of(found, folder=folder), folder=self.folder / folder)
        self._near.append(near)
        return near

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
        ahead: Names[str] | None = None,
        anew: Callable[[], bool] = lambda: False,
    ) -> None:
        """Return when a unit lies here. Threads of one process that want the same wait for the first.

        `ahead`: the unit is not needed yet, and must not displace these, which will be before it."""
        self.check_process()
        while anew() or not self.shelf.holds(unit):
            with self._lock:
                coming, mine = self._coming.get(unit.key), Future[None]()
                if coming is None:
                    self._coming[unit.key] = mine
            if coming is not None:
                coming.exception()  # whatever it met, it may be another matter for us
                continue
            try:
                self._fetcher.bring(unit, on_bytes=on_bytes, on_wait=on_wait, ahead=ahead, anew=anew)
            except Stopped:
                raise StorageError("the cache was closed while it was used", hint="close it last") from None
            finally:
                with self._lock:
                    del self._coming[unit.key]
                mine.set_result(None)
            return

    def place(self, unit: Unit, name: str) -> Path:
        """Where to read a file that lies here: in memory where preloading was asked for and it fits."""
        with self._lock:
            if self._memory is None:
                self._memory = make_preload(self._preload, ttl_s=self._ttl_s, keep=self._keep)
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
        self._wire.close()

    def close(self) -> None:
        """Let go of everything that is held; safe twice."""
        if self._closed or os.getpid() != self._pid:
            return
        self.stop()
        for near in self._near:
            near.close()
        self._closed = True
        if self._memory:
            self._memory.close()
        self.pins.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.folder, self._options)


def default_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """$STOKER_CACHE, else a folder under the temporary one that is this user's alone."""
    if folder := environ.get("STOKER_CACHE"):
        return path_behind(folder).absolute()
    path = Path(tempfile.gettempdir()) / f"stoker-cache-{os.getuid()}"
    return own_folder(path, hint="set STOKER_CACHE to a folder of yours")


def _reopen(folder: Path, options: dict[str, Any]) -> Cache:
    return Cache(folder, **options)


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


def _absolute(url: str | Path) -> str:
    if not str(url).strip():  # else it would be the working folder, with all that lies there
        raise UsageError("the URL is empty", hint="a variable in the command may not be set")
    return str(path_behind(url).absolute()) if is_local(url) else str(url)
