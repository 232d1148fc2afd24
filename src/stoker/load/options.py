"""What a loader can be asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.load.samples import Collate, Transform
from stoker.ordering.order import Cut
from stoker.world import World

PACKINGS = ("concat", "best-fit", "pad", "buckets")

# 24 lanes hold 12 MiB. A longer read is no faster from the page cache, and leaves less of the second-level
# cache to the gather; for disks read with O_DIRECT use 8 MiB or more.
CHUNK_BYTES = 512 << 10


# What people ask of torch's DataLoader, and where it is here.
OF_DATALOADERS = {
    "num_workers": "threads read by themselves; for a slow transform use workers='process', processes=N",
    "drop_last": "use tail='drop' or tail='pad'",
    "collate_fn": "use collate=",
    "pin_memory": "stoker.feed(..., device='cuda') pins and copies by itself",
    "prefetch_factor": "depth is tuned within memory=",
    "sampler": "the order is computed from shuffle= and seed=, for all ranks",
    "batch_sampler": "the order is computed from shuffle= and seed=, for all ranks",
    "persistent_workers": "workers live as long as the loader",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """The options of `Loader`; `batch_size` counts this rank's rows.

    packing     "concat": documents end to end, cut at seq_len; "best-fit": whole documents, several a row;
                "pad": one document a row; "buckets": one a row, rows of like length together, padded less
    labels      "next": shifted by one; "same": as input_ids, for models that shift themselves; "": none
    documents   with "concat": also document_ids, position_ids and cu_seqlens
    tail        what does not fill a global batch at the end of an epoch: "drop", or "pad" with samples
                from its beginning (and `real` saying which rows are not such padding)
    workers     "thread", "process" (for slow Python transforms), or "inline": no thread at all
    memory      bytes for chunks and batches in waiting
    lanes       of the order, a multiple of every world size the job may run on
    cut         how samples are cut into lanes, where it is not for this world: what a saved position keeps
    output      "torch" or "numpy"; dtype: of token ids, None for as they are on disk
    device      where batches of token windows are to be made: "" for the host; see `stoker.feed`
    """

    batch_size: int
    seq_len: int = 0
    shuffle: str = "full"
    seed: int = 0
    world: World = field(default_factory=World.from_environ)
    packing: str = "concat"
    labels: str = "next"
    documents: bool = False
    pad_id: int = 0
    tail: str = "drop"
    transform: Transform | None = None
    collate: Collate | None = None
    workers: str = "thread"
    processes: int = 2
    on_worker_death: str = "raise"
    memory: int = 256 << 20
    lanes: int = 0
    cut: Cut | None = None
    chunk_bytes: int = CHUNK_BYTES
    window: int = 1
    reader: str = "pread"
    readers: int = 0
    on_corrupt: str = "raise"
    output: str = "torch"
    dtype: Any = np.int64  # anything numpy takes for a dtype, or None
    device: str = ""

    def __post_init__(self) -> None:
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if value not in allowed:
                raise UsageError(
                    f"{name}={value!r} is unknown", hint=f"use one of {', '.join(map(repr, allowed))}"
                )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or (least is not None and int(value) < least):
                wanted = "a whole number" if least is None else f"a whole number from {least:,}"
                raise UsageError(f"{name}={value!r} cannot work", hint=f"use {wanted}")
            object.__setattr__(self, name, int(value))  # numpy's do not go into JSON
        try:
            np.dtype(self.dtype or np.int64)
        except TypeError as error:
            raise UsageError(
                f"dtype={self.dtype!r} is none that numpy knows", hint="use 'int32', numpy.int32 or None"
            ) from error
        if self.packing == "best-fit" and self.tail == "pad":
            raise UsageError("best-fit packing cannot pad the tail", hint="use tail='drop'")


_LEAST: dict[str, int | None] = {
    "seed": None,
    "batch_size": 1,
    "seq_len": 0,
    "processes": 1,
    "memory": 1 << 20,
    "lanes": 0,
    "chunk_bytes": 1,
    "window": 1,
    "readers": 0,
}

_ALLOWED: dict[str, tuple[str, ...]] = {
    "packing": PACKINGS,
    "labels": ("next", "same", ""),
    "tail": ("drop", "pad"),
    "workers": ("thread", "process", "inline"),
    "on_worker_death": ("raise", "restart"),
    "output": ("torch", "numpy"),
}
