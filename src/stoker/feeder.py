"""`feed`: shards to batches on the device, in one call.

    for batch in stoker.feed("corpus", batch_size=8, seq_len=2048):
        loss = model(batch["input_ids"], batch["labels"])

It wires where the shards lie, the loader and the device. Its position is the loader's: `state_dict` and
`load_state_dict` go with a checkpoint.

A dataset that is not on this machine (`s3://bucket/corpus`) comes through a cache: training starts on the
first shards while the rest arrive in the order in which they will be read.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from stoker.load.loader import Loader
from stoker.load.report import LoaderReport
from stoker.load.rows import Batch
from stoker.reading.dataset import Source
from stoker.reading.files import Files
from stoker.storage import is_local
from stoker.world import World

if TYPE_CHECKING:
    import torch

    from stoker.stage.cache import Cache
    from stoker.stage.near import Near


def feed(
    dataset: Source | Sequence[Source],
    *,
    device: str | torch.device = "auto",
    files: Files | None = None,
    cache: Cache | str | Path | None = None,
    weights: Sequence[float] = (),
    **options: Any,  # the fields of LoaderOptions
) -> Feeder:
    """Batches of a dataset on a device: "auto" is this rank's GPU where there is one, else the CPU.

    A URL is read through `cache`: a `stoker.Cache`, the folder of one, or by default $STOKER_CACHE, else a
    folder of this user's under the temporary one. With `cache` given, so are paths (of NFS or Lustre, say).
    `files` says instead where the shards lie near: any object with `local_path(name)`."""
    return Feeder(dataset, device=device, files=files, cache=cache, weights=weights, **options)


class Feeder:
    """A loader whose batches arrive on a device. Iterate, `close` (or use as a context manager)."""

    def __init__(
        self,
        dataset: Source | Sequence[Source],
        *,
        device: str | torch.device = "auto",
        files: Files | None = None,
        cache: Cache | str | Path | None = None,
        weights: Sequence[float] = (),
        **options: Any,  # the fields of LoaderOptions
    ) -> None:
        from stoker.load.device import Copier, Device  # torch, only when something is to be fed

        self._given = {"device": device, "files": files, "cache": cache, "weights": weights, **options}
        self._dataset = dataset
        name = _this_ranks_device(options.get("world")) if device == "auto" else str(device)
        device_of_feeder = Device(name)
        # on a CPU the loader's own batches are where they should be: numpy gathers faster than torch
        where = name if device_of_feeder.is_cuda else ""
        sources: list[Any] = list(dataset) if isinstance(dataset, (list, tuple)) else [dataset]
        self._staged = None if files else _staged(sources, cache)
        try:
            self.loader = Loader(
                self._staged.sources if self._staged else dataset,
                files=files,
                weights=weights,
                device=where,
                **options,
            )
            self._prefetch()
        except BaseException:
            if self._staged:
                self._staged.close()
            raise
        # a feeder that is dropped lets go of its cache; one that lives until the process ends takes it along
        weakref.finalize(self, _close_apart, self.loader, self._staged).atexit = False
        on_device = self.loader.makes_on_device or not device_of_feeder.is_cuda
        self._copier = None if on_device else Copier(device_of_feeder)
        self._state: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Batch]:
        if self._copier is None:
            yield from self.loader
            return
        if self._state and self.loader.options.shuffle != "off":  # left early: copies had run ahead
            self.loader.load_state_dict(self._state)
        # the position is that of the batch handed out, not of the latest copied
        for batch, state in self._copier.copied(iter(self.loader), given=self.loader.state_dict):
            self._state = state
            yield batch
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
    def is_behind(self) -> bool:
        """Whether no batch is ready to be handed out: what else uses disk and network should yield."""
        return self.loader.is_behind

    def report(self) -> LoaderReport:
        return self.loader.report()

    def close(self) -> None:
        _close(self.loader, self._staged)

    def __reduce__(self) -> tuple[Any, ...]:
        """Into another process, as it stands here; what comes through a cache comes through one there."""
        return _refeed, (self._dataset, self._given, self.state_dict())

    def _prefetch(self) -> None:
        """What is read next comes next."""
        if self._staged:
            self._staged.prefetch(self.loader)

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _refeed(dataset: Any, given: dict[str, Any], state: dict[str, Any]) -> Feeder:
    feeder = Feeder(dataset, **given)
    feeder.load_state_dict(state)
    return feeder


def _this_ranks_device(world: World | None) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    world = world or World.from_environ()
    # a launcher may show each rank its own card only, or all of them
    return f"cuda:{world.local_rank % torch.cuda.device_count()}"


class _Staged:
    """Sources of which some come through a cache."""

    def __init__(self, sources: Sequence[Source], cache: Cache, *, owned: bool) -> None:
        self.sources, self._cache, self._owned = list(sources), cache, owned
        self._near: dict[int, Near] = {}

    def bring(self, number: int) -> None:
        self.sources[number] = self._near[number] = self._cache.at(str(self.sources[number]))

    def prefetch(self, loader: Loader) -> None:
        for number, near in self._near.items():
            near.prefetch(loader.files_in_order(number))

    def close(self) -> None:
        if self._owned:
            self._cache.close()
        for near in self._near.values():
            near.close()


def _close_apart(loader: Loader, staged: _Staged | None) -> None:
    """A feeder may be found dropped in any thread, also in one that holds a lock of the cache's."""
    threading.Thread(target=_close, args=(loader, staged), name="stoker-close", daemon=True).start()


def _close(loader: Loader, staged: _Staged | None) -> None:
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
