"""`feed`: shards to batches on the device, in one call.

    for batch in stoker.feed("corpus", batch_size=8, seq_len=2048):
        loss = model(batch["input_ids"], batch["labels"])

It wires where the shards lie, the loader and the device. Its position is the loader's: `state_dict` and
`load_state_dict` go with a checkpoint.

A dataset that is not on this machine (`s3://bucket/corpus`) comes through a cache: what the first batch needs
comes first, and the rest behind it, in the order in which it will be read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any

from stoker.errors import require
from stoker.load.assembly.rows import Batch
from stoker.load.ending import presenter
from stoker.load.ledger import Document, Row
from stoker.load.loader import Loader
from stoker.load.options import OF_DATALOADERS, LoaderOptions
from stoker.load.reading.dataset import Source
from stoker.load.report import LoaderReport
from stoker.load.state import step_of
from stoker.options import called_like, given, takes
from stoker.storage import is_local
from stoker.world import World

if TYPE_CHECKING:
    import torch

    from stoker.stage.cache import Cache
    from stoker.stage.near import Near


@dataclass(frozen=True, kw_only=True, slots=True)
class FeedOptions(LoaderOptions):
    """The options of `feed`: those of a loader, and where batches go and datasets come through."""

    device: Annotated[
        str | torch.device, 'where batches go; "auto": this rank\'s GPU where there is one, else the CPU'
    ] = "auto"
    cache: Annotated[
        Cache | str | Path | None,
        "what a URL is read through: a `stoker.Cache`, the folder of one, or by default $STOKER_CACHE, else "
        "a folder of this user's under the temporary one. Given, it is for paths too (of NFS or Lustre, say)",
    ] = None


class Feeder:
    """A loader whose batches arrive on a device. Iterate, `close` (or use as a context manager)."""

    @takes(FeedOptions, of="a loader", elsewhere=OF_DATALOADERS)
    def __init__(self, options: FeedOptions) -> None:
        require("torch", extra="torch")  # only when something is to be fed
        from stoker.load.device.streams import Copier, Device

        name = _this_ranks_device(options.world) if options.device == "auto" else str(options.device)
        device_of_feeder = Device(name)
        # on a CPU the loader's own batches are where they should be: numpy gathers faster than torch
        where = name if device_of_feeder.is_cuda else ""
        self._staged = None if options.files else _staged(options.sources, options.cache)
        try:
            near = self._staged.sources if self._staged else options.dataset
            self.loader = Loader(**{**given(options, LoaderOptions), "dataset": near, "device": where})
            self._options = replace(options, mesh=self.loader.options.mesh)  # which goes into other processes
            self._prefetch()
        except BaseException:
            if self._staged:
                self._staged.close()
            raise
        # a feeder that is dropped lets go of its cache; one that lives until the process ends takes it along
        weakref.finalize(self, _close_apart, self.loader, self._staged).atexit = False
        on_device = self.loader.makes_on_device or not device_of_feeder.is_cuda
        self._copier = None if on_device else Copier(device_of_feeder)
        # images cross as bytes, and what was asked for is made of them on the stream that uses them
        self._present = (
            presenter(self.loader.options) if self._copier and self.loader.options.pixels else None
        )
        self._state: dict[str, Any] | None = None
        self._began = False

    def __iter__(self) -> Iterator[Batch]:
        if self.loader.settle() or self._began:
            self._prefetch()  # of another share than was thought, or another epoch
        self._began = True
        if self._copier is None:
            for batch in self.loader:
                yield batch
                self._go()
            return
        if self._state and self.loader.options.shuffle != "off":  # left early: copies had run ahead
            self.loader.load_state_dict(self._state)
        made = self.loader.untouched() if self._present else iter(self.loader)
        # the position is that of the batch handed out, not of the latest copied
        for batch, state in self._copier.copied(made, given=self.loader.state_dict):
            self._state = state
            yield self._present(batch) if self._present else batch
            self._go()
        self._state = None

    def __len__(self) -> int:
        return len(self.loader)

    @property
    def batch_size(self) -> int:
        return self.loader.batch_size

    @property
    def dataset(self) -> object:
        return self.loader.dataset

    def state_dict(self) -> dict[str, Any]:
        """Where the whole job is, after the batches handed out so far; the same on every rank."""
        return self._state or self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = None
        self.loader.load_state_dict(state)
        self._prefetch()

    @property
    def step(self) -> int:
        """Batches of each rank since the job began, those before a resume included."""
        return step_of(self._state) if self._state else self.loader.step

    def samples(self, step: int, *, rank: int | None = None) -> list[Row]:
        """The rows of any past or future step, of one rank or all: which documents are in them, and where
        those lie. Computed from the order, nothing is read but indexes."""
        return self.loader.samples(step, rank=rank)

    def read(self, document: Document) -> Any:
        """What a document of the ledger holds: ids, the members of a tar's sample, or the sample itself."""
        return self.loader.read(document)

    @property
    def is_behind(self) -> bool:
        """Whether no batch is ready to be handed out: what else uses disk and network should yield."""
        return self.loader.is_behind

    def report(self) -> LoaderReport:
        return self.loader.report()

    def close(self) -> None:
        _close(self.loader, self._staged)

    def __reduce__(self) -> tuple[Any, ...]:
        """Into another process, as it stands here; what comes through a cache comes through one there."""
        return _refeed, (self._options, self.state_dict())

    def _prefetch(self) -> None:
        """What is read next comes next."""
        if self._staged:
            self._staged.prefetch(self.loader)

    def _go(self) -> None:
        """The first batch is used: what is not waited for may come now."""
        if self._staged:
            self._staged.go()

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@called_like(Feeder, FeedOptions)
def feed(*args: Any, **options: Any) -> Feeder:
    """Batches of a dataset on a device, in one call."""
    return Feeder(*args, **options)


def _refeed(options: FeedOptions, state: dict[str, Any]) -> Feeder:
    feeder = Feeder(**given(options, FeedOptions))
    feeder.load_state_dict(state)
    return feeder


def _this_ranks_device(world: World | None) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    world = world or World.here()
    if world.launcher == "single":  # as the program chose, which may have been started by anybody
        return f"cuda:{torch.cuda.current_device()}"
    # a launcher may show each rank its own card only, or all of them
    return f"cuda:{world.local_rank % torch.cuda.device_count()}"


class _Staged:
    """Sources of which some come through a cache."""

    def __init__(self, sources: Sequence[Source], cache: Cache, *, owned: bool) -> None:
        self.sources, self._cache, self._owned = list(sources), cache, owned
        self._near: dict[int, Near] = {}
        self._went = False

    def bring(self, number: int) -> None:
        self.sources[number] = self._near[number] = self._cache.at(str(self.sources[number]))

    def prefetch(self, loader: Loader) -> None:
        for number, near in self._near.items():
            if not near.is_here:  # to work out an order takes 30 ms for half a gigabyte, and up to 0.5 s
                near.prefetch(loader.files_in_order(number))

    def go(self) -> None:
        if not self._went:
            self._went = True
            self._cache.through.go()

    def stop(self) -> None:
        for near in self._near.values():
            near.stop()

    def close(self) -> None:
        if self._owned:
            self._cache.close()
        for near in self._near.values():
            near.close()


def _close_apart(loader: Loader, staged: _Staged | None) -> None:
    """A feeder may be found dropped in any thread, also in one that holds a lock of the cache's."""
    threading.Thread(target=_close, args=(loader, staged), name="stoker-close", daemon=True).start()


def _close(loader: Loader, staged: _Staged | None) -> None:
    if staged:
        staged.stop()  # a reading thread may wait for a slow store
    loader.close()
    if staged:
        staged.close()


def _staged(sources: Sequence[Source], cache: Cache | str | Path | None) -> _Staged | None:
    """Sources as they are to be read, if any of them comes through a cache."""
    from stoker.stage.cache import Cache as StageCache

    plain = (str, Path)
    coming = [n for n, one in enumerate(sources) if isinstance(one, plain) and (cache or not is_local(one))]
    if not coming:
        return None
    owned = not isinstance(cache, StageCache)
    staged = _Staged(sources, cache if isinstance(cache, StageCache) else StageCache(cache), owned=owned)
    try:
        for number in coming:
            staged.bring(number)
    except BaseException:
        staged.close()
        raise
    return staged
