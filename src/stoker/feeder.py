"""`feed`: shards to batches on the device, in one call.

    for batch in stoker.feed("corpus", batch_size=8, seq_len=2048):
        loss = model(batch["input_ids"], batch["labels"])

It wires where the shards lie, the loader and the device. Its position is the loader's: `state_dict` and
`load_state_dict` go with a checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

from stoker.load.batch import Batch
from stoker.load.dataset import Source
from stoker.load.loader import Loader, LoaderReport
from stoker.load.reader import Files
from stoker.world import World


def feed(
    dataset: Source | Sequence[Source],
    *,
    device: str = "auto",
    files: Files | None = None,
    weights: Sequence[float] = (),
    **options: Any,  # the fields of LoaderOptions
) -> Feeder:
    """Batches of a dataset on a device: "auto" is this rank's GPU where there is one, else the CPU.

    `files` says where the shards of a remote dataset lie near: any object with `local_path(name)`."""
    return Feeder(dataset, device=device, files=files, weights=weights, **options)


class Feeder:
    """A loader whose batches arrive on a device. Iterate, `close` (or use as a context manager)."""

    def __init__(
        self,
        dataset: Source | Sequence[Source],
        *,
        device: str = "auto",
        files: Files | None = None,
        weights: Sequence[float] = (),
        **options: Any,  # the fields of LoaderOptions
    ) -> None:
        from stoker.load.device import Copier, Device  # torch, only when something is to be fed

        name = _this_ranks_device(options.get("world")) if device == "auto" else device
        device_of_feeder = Device(name)
        # on a CPU the loader's own batches are where they should be: numpy gathers faster than torch
        where = name if device_of_feeder.is_cuda else ""
        self.loader = Loader(dataset, files=files, weights=weights, device=where, **options)
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

    def state_dict(self) -> dict[str, Any]:
        """Where the whole job is, after the batches handed out so far; the same on every rank."""
        return self._state or self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state = None
        self.loader.load_state_dict(state)

    def report(self) -> LoaderReport:
        return self.loader.report()

    def close(self) -> None:
        self.loader.close()

    def __enter__(self) -> Feeder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _this_ranks_device(world: World | None) -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    world = world or World.from_environ()
    # a launcher may show each rank its own card only, or all of them
    return f"cuda:{world.local_rank % torch.cuda.device_count()}"
