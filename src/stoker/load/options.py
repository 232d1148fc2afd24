"""Loader options: what a loader can be asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np

from stoker.errors import UsageError
from stoker.load.assembly.samples import Collate
from stoker.load.assembly.transform import Transform
from stoker.load.media.av.audio import NAME as AUDIO
from stoker.load.media.av.audio import Audio
from stoker.load.media.av.video import NAME as VIDEO
from stoker.load.media.av.video import Video
from stoker.load.media.image import Image, columns_of
from stoker.load.mesh import Spot
from stoker.load.ordering.schedule import Mixture
from stoker.load.reading.dataset import Source
from stoker.load.reading.files import Files
from stoker.options import check_choices
from stoker.world import World

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from stoker.load.ledger import Document, Row
    from stoker.load.past import Past

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
    "timeout": "a worker that dies is noticed at once; on_worker_death says what then",
    "worker_init_fn": "make what a worker needs in `transform`, or when the dataset is unpickled there",
    "multiprocessing_context": "workers are spawned, never forked: threads and stores do not survive a fork",
    "generator": "the order is computed from seed=",
    "in_order": "batches come in the computed order, always",
    "pin_memory_device": "stoker.feed(..., device='cuda') pins and copies by itself",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """The options of `Loader`: to add one, add a field."""

    dataset: Annotated[
        Source | Sequence[Source],
        "a prepared dataset, as its folder or an object with `local_path(name)`; a raw .bin of token ids; an "
        "array; a Hugging Face dataset; what has `__len__` and `__getitem__`. Several in a list are blended",
    ] = field(kw_only=False)
    batch_size: Annotated[int, "rows in a batch of this rank"]
    seq_len: Annotated[int, "tokens in a row; 0 for datasets of samples, such as tars"] = 0
    shuffle: Annotated[
        Literal["full", "blocks", "off"],
        '"full": chunks permuted, and the samples in them; "blocks": chunks permuted; "off": the order on '
        "disk, each loop from its beginning, for evaluation",
    ] = "full"
    seed: Annotated[
        int, "of the order, from 0 to 2**64 - 1; the same seed gives the same order on any machine"
    ] = 0
    weights: Annotated[
        Sequence[float] | Mixture,
        "shares of several datasets in a blend; none: equal ones; `stoker.Mixture` for shares that change",
    ] = ()
    packing: Annotated[
        Literal["concat", "best-fit", "pad", "buckets"],
        '"concat": documents end to end, cut at seq_len; "best-fit": whole documents, several a row; '
        '"pad": one document a row; "buckets": one a row, rows of like length together, padded less',
    ] = "concat"
    labels: Annotated[
        Literal["next", "same", ""],
        '"next": input_ids shifted by one; "same": as input_ids, for models that shift themselves; "": none',
    ] = "next"
    documents: Annotated[bool, 'with "concat": also document_ids, position_ids and cu_seqlens'] = False
    pad_id: Annotated[int, "the token id that fills rows which are not full"] = 0
    tail: Annotated[
        Literal["drop", "pad"],
        "what does not fill a global batch at the end of an epoch: left out, or filled with samples from the "
        "epoch's beginning (and `real` says which rows are not such padding)",
    ] = "drop"
    skip: Annotated[
        Sequence[str | Document | Row],
        "documents to leave out from here on, by the names that `stoker order` and `samples(step)` give; the "
        "state keeps them out",
    ] = ()
    image: Annotated[
        Image | Mapping[str, Image] | None,
        "decode the image in each sample of tars: `stoker.Image` says how; several by name are crops of one",
    ] = None
    audio: Annotated[
        Audio | None, "decode the sound in each sample of tars, or that of its video: `stoker.Audio` says how"
    ] = None
    video: Annotated[
        Video | None, "decode frames of the video in each sample of tars: `stoker.Video` says which, and how"
    ] = None
    transform: Annotated[
        Transform | None, "makes of one sample, with its media decoded, what is collated"
    ] = None
    collate: Annotated[Collate | None, "makes of a list of samples a batch; none: stacked, key by key"] = None
    workers: Annotated[
        Literal["thread", "process", "inline"],
        '"process" is for slow Python transforms; "inline" is no thread at all, for debugging',
    ] = "thread"
    processes: Annotated[int, 'how many, with workers="process"'] = 2
    threads: Annotated[
        int,
        'that decode media and run `transform`, with workers="thread"; 0: as many as there are cores; 1: '
        "one after the other",
    ] = 0
    on_worker_death: Annotated[
        Literal["raise", "restart"], "what to do when a worker process dies; two restarts an item at most"
    ] = "raise"
    on_corrupt: Annotated[
        Literal["raise", "skip"],
        "what to do with a damaged block, or an image, sound or video that cannot be decoded; skipped "
        "samples are counted and named",
    ] = "raise"
    memory: Annotated[int, "bytes for chunks and batches in waiting"] = 256 << 20
    chunk_bytes: Annotated[int, "neighbouring samples read at once: more mix better and take more memory"] = (
        CHUNK_BYTES
    )
    window: Annotated[int, "chunks of a lane that are mixed with each other"] = 1
    lanes: Annotated[
        int, "of the order: a multiple of every number of ranks the job may run on; 0: of this one"
    ] = 0
    reader: Annotated[
        Literal["pread", "direct", "mmap", "cufile"],
        '"pread" is through the page cache; "direct" (O_DIRECT) for a corpus larger than memory; "mmap" for '
        'one that lies in memory; "cufile" is GPUDirect Storage',
    ] = "pread"
    readers: Annotated[int, "threads that read; 0: as many as help, measured while it runs"] = 0
    output: Annotated[Literal["torch", "numpy"], "what batches are made of"] = "torch"
    dtype: Annotated[Any, "of token ids: anything numpy takes for one; None: as they are on disk"] = "int64"
    bin_dtype: Annotated[str, "of the ids in a raw .bin without an index, such as nanoGPT's"] = "uint16"
    device: Annotated[
        str | torch.device, 'where rows of tokens are to be made; "" is the host. Rather use `stoker.feed`'
    ] = ""
    files: Annotated[
        Files | None, "where the shards lie near, if not in the dataset's folder: has `local_path(name)`"
    ] = None
    past: Annotated[
        Past | None, "the course of a job that goes on, for worker processes: what a saved position keeps"
    ] = None
    world: Annotated[
        World | None,
        "which rank of how many this is; none: as torch.distributed or the launcher's environment says when "
        "the first batch is asked for",
    ] = None
    mesh: Annotated[
        DeviceMesh | Spot | None,
        "torch's, of all ranks, with names: ranks that differ in tp or pp get the same batch, those of cp a "
        "part of its tokens, the others their share. In the place of `world`",
    ] = None
    mesh_dims: Annotated[
        Mapping[str, Literal["data", "same", "sequence"]],
        'what dimensions with names of your own are for: "data", "same" batch, part of the "sequence"',
    ] = field(default_factory=dict)
    mesh_layout: Annotated[
        Literal["contiguous", "head-tail"],
        'of the parts that ranks of cp get: one stretch of each row, or "head-tail", for causal ring '
        "attention: a row in twice as many pieces, each rank one from the front and its fellow from the back",
    ] = "contiguous"

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):  # as a DataLoader is asked
            object.__setattr__(self, "shuffle", "full" if self.shuffle else "off")
        check_choices(self)
        object.__setattr__(self, "device", str(self.device))
        for name, least in _LEAST.items():
            value = getattr(self, name)
            is_whole = isinstance(value, Integral) and not isinstance(value, (bool, np.bool_))
            if not is_whole or (least is not None and int(value) < least):
                wanted = "a whole number" if least is None else f"a whole number from {least:,}"
                raise UsageError(f"{name}={value!r} cannot work", hint=f"use {wanted}")
            object.__setattr__(self, name, int(value))  # numpy's do not go into JSON
        if self.seed > _MOST_SEED:
            raise UsageError(f"seed={self.seed} is another seed's order", hint=f"use one up to {_MOST_SEED}")
        self._check_sources()
        if self.world is not None and not isinstance(self.world, World):
            raise UsageError(
                f"world={self.world!r} is no stoker.World", hint="use world=stoker.World(rank=0, size=2)"
            )
        self._check_dtype()
        if not isinstance(self.weights, Mixture) and not all(isinstance(one, Real) for one in self.weights):
            raise UsageError(
                f"weights={self.weights!r} are not all numbers", hint="give one for each dataset"
            )
        if self.mesh is not None and self.world is not None and not isinstance(self.mesh, Spot):
            raise UsageError("mesh= and world= both say which rank this is", hint="give one of them")
        self._check_images()
        if self.packing == "best-fit" and self.tail == "pad":
            raise UsageError("best-fit packing cannot pad the tail", hint="use tail='drop'")

    def _check_sources(self) -> None:
        """A list is a blend of datasets; people also have lists of samples."""
        if not isinstance(self.dataset, (list, tuple)):
            return
        if not (sources := self.sources):
            raise UsageError(
                "a list of no datasets is no blend", hint="give one dataset, or several in a list"
            )
        if isinstance(first := sources[0], (dict, tuple, int, float, bytes)) and not hasattr(
            first, "with_format"
        ):
            raise UsageError(
                f"a list is a blend of datasets, and this one holds a {type(first).__qualname__}",
                hint="for a list of samples give datasets.Dataset.from_list(samples), an array, or an object "
                "of your own with __len__ and __getitem__",
            )

    def _check_images(self) -> None:
        for name, kind in (("audio", Audio), ("video", Video)):
            if not isinstance(getattr(self, name), (kind, type(None))):
                raise UsageError(
                    f"{name}={getattr(self, name)!r:.60} is no stoker.{kind.__name__}",
                    hint=f"use {name}=stoker.{kind.__name__}()",
                )
        for name in self.images.keys() & {AUDIO if self.audio else "", VIDEO if self.video else ""}:
            raise UsageError(
                f"image= and {name}= both make a column {name!r}", hint="call the images otherwise"
            )
        for one in self.pixels.values():
            if self.output == "numpy" and one.number == "bfloat16":
                raise UsageError("numpy has no bfloat16", hint='use output="torch", or another dtype')

    @property
    def images(self) -> dict[str, Image]:
        """The columns that are images."""
        return columns_of(self.image)

    @property
    def pixels(self) -> dict[str, Image]:
        """The columns that are images or frames of video, and what each of those is to be."""
        return {**self.images, VIDEO: self.video.image} if self.video else self.images

    @property
    def decodes(self) -> str:
        """Which of the options ask for decoded members of samples; empty: none."""
        asked = {"image": self.image, "audio": self.audio, "video": self.video}
        return ", ".join(f"{name}=" for name, one in asked.items() if one is not None)

    def _check_dtype(self) -> None:
        try:
            is_number = np.dtype(self.dtype or np.int64).kind in "iuf"
        except TypeError:
            is_number = False
        if not is_number:
            raise UsageError(
                f"dtype={self.dtype!r} is none of numbers that numpy knows",
                hint="use 'int32', numpy.int32 or None",
            )

    @property
    def place(self) -> World:
        """The world, where a loader has found out which."""
        return self.world or World()

    @property
    def sources(self) -> list[Source]:
        """The dataset, or those of a blend."""
        some: Any = self.dataset  # a sequence that is none: a str
        return list(some) if isinstance(some, (list, tuple)) else [some]


_MOST_SEED = 2**64 - 1  # a key has so many bits: beyond, orders would come again without a word

_LEAST: dict[str, int | None] = {
    "seed": 0,
    "pad_id": None,
    "batch_size": 1,
    "seq_len": 0,
    "processes": 1,
    "threads": 0,
    "memory": 1 << 20,
    "lanes": 0,
    "chunk_bytes": 1,
    "window": 1,
    "readers": 0,
}
