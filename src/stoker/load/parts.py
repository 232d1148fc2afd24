"""Sizing of a loader: from options to layouts, orders, a planner, and the memory that chunks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.load.options import LoaderOptions
from stoker.load.ordering.blend import Blend, make_blend
from stoker.load.ordering.cut import Cut
from stoker.load.ordering.dealing import Dealing
from stoker.load.ordering.draw import Draw
from stoker.load.ordering.order import Order
from stoker.load.ordering.plan import (
    BestFitPlanner,
    Cursor,
    EpochsPlanner,
    FixedPlanner,
    Lengths,
    Ordered,
    Planner,
    Sorted,
)
from stoker.load.ordering.rounds import Share
from stoker.load.ordering.spans import Elastic
from stoker.load.ordering.without import LeavingOut, LeftOut, kept_parts, of_layout
from stoker.load.reading.dataset import Dataset
from stoker.load.reading.items import ItemsDataset, ItemsLayout
from stoker.load.reading.layout import Documents, Layout, Windows
from stoker.mixing import Integers, key_of

# Rows gathered at once: smaller pays Python per group (2.8 ns of CPU a token at 2 MiB, 2.3 at 4, 2.2 at 6),
# larger costs memory.
_GROUP_BYTES = 4 << 20
_INLINE_GROUP_BYTES = 16 << 20  # gathered as they are asked for, so a group is only planned
# Tokens as they lie on disk are copied past the caches, which a large group does not fill: 0.44 s of CPU a GB
# with 4 MiB, 0.35 with 16 (reading past the page cache on two cores: 0.87 of the disk, and 0.92).
_COPIED_GROUP_BYTES = 16 << 20

# Read before a lane goes elsewhere: a good part of a shard. While shards are still on their way to this node,
# each lane waits for the one or two that a stretch lies in.
STRETCH_BYTES = 256 << 20

# Items are not held in chunks, so as many as one likes are mixed. Smaller chunks would take longer to compute
# than samples take to be asked for (100 us each in chunks of 1, 3 in these).
_ITEMS_CHUNK, _ITEMS_WINDOW = 16, 64

# Reads at once: over 80 ms of latency they bring 400 MB/s in chunks of 512 KiB; page-cache reads reached
# 64 GB/s with 16 threads on the H200 machine.
MOST_READERS = 64
# Packings for which rows of all lanes are sorted or packed together: every rank reads some of each.
ALL_LANES = ("buckets", "best-fit")

SPARE = 4  # chunks read ahead
_GROUPS_AHEAD = 3  # and, beside those, what so many groups of batches use up


AnyDataset = Dataset | ItemsDataset


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a loader is made of. `layouts` has one entry per dataset of a blend, or per epoch on disk."""

    planner: Planner
    lanes: Sequence[Elastic | Blend]  # of each layout, or of the blend
    orders: Sequence[Order]
    layouts: Sequence[Layout]
    datasets: Sequence[Any]  # all of one kind, as the layouts are
    chunks: Sequence[int]
    slots: int
    in_flight: int  # chunks that may be on their way at once, at most
    memory_wanted: int  # for the chunks of all lanes
    alone: bool  # they do not get it, so windows are read one by one
    group: int
    batch_bytes: int
    ahead: int


def make_parts(
    datasets: Sequence[AnyDataset],
    options: LoaderOptions,
    *,
    cut: Cut,
    dealing: Dealing,
    left_out: Sequence[LeftOut] = (),
) -> Parts:
    _check_dtype([one for one in datasets if isinstance(one, Dataset)], options)
    layouts, owners = make_layouts(datasets, options)
    orders = tuple(_order(layout, options, number, cut) for number, layout in enumerate(layouts))
    chunks = [order.chunk for order in orders]
    batch_bytes = _batch_bytes(layouts, options)
    group = max(1, min(128, _target(layouts, options) // batch_bytes))
    used_up = -(-group * options.batch_size // min(chunks))
    groups = 1 if options.workers == "inline" else _GROUPS_AHEAD
    slots = _slots(options, cut, blended=len(datasets)) + groups * used_up
    slot = max(slot_bytes(layouts, chunks))
    memory_wanted = slots * slot * 4 // 3  # the rest is for batches in waiting
    lanes = lanes_for(orders, options, cut, dealing, share_of(options))
    return Parts(
        planner=planner_for(layouts, lanes, options, share_of(options), left_out),
        lanes=lanes,
        orders=orders,
        layouts=layouts,
        datasets=owners,
        chunks=chunks,
        slots=slots,
        in_flight=max(SPARE, min(MOST_READERS, options.memory * 3 // 4 // max(1, slot) - slots + SPARE)),
        memory_wanted=memory_wanted,
        alone=memory_wanted > options.memory and isinstance(layouts[0], Windows),
        group=group,
        batch_bytes=batch_bytes,
        ahead=min(64, -(-max(chunks) // (group * options.batch_size))),
    )


def resumed_cut(cut: Cut, cursor: Cursor, options: LoaderOptions, left_out: Sequence[LeftOut] = ()) -> Cut:
    """The lanes a position was saved with, cut anew where this world cannot share them out. What was left out
    of an epoch had others take its place, from its end: the rest of that epoch stays as it is."""
    world = options.place
    if options.shuffle == "off" or options.packing in ALL_LANES or len(options.sources) > 1:
        return cut  # the samples at a position are the same for any number of ranks
    if any(some.begin(cursor.epoch) is not None for some in left_out):
        return cut.later(world.size, world.nodes, epoch=cursor.epoch)
    return cut.resumed(world.size, world.nodes, epoch=cursor.epoch, position=cursor.position)


def read_factor(parts: Parts, options: LoaderOptions, cut: Cut, *, at: Cursor | None = None) -> float:
    """How often a sample is read by all ranks together: once, if each keeps to lanes of its own, as ranks can
    that go on `at` a whole round of theirs."""
    world, chunk = options.place.size, max(parts.chunks)
    if options.shuffle == "off":
        return 1.0 if chunk == 1 else float(world)
    if isinstance(blend := parts.lanes[0], Blend) and options.packing not in ALL_LANES:
        return blend.read_factor
    lanes = parts.lanes[at.epoch % len(parts.lanes)] if at else None
    is_whole = (
        not at or not isinstance(lanes, Elastic) or lanes.begins_round(at.position, world, epoch=at.epoch)
    )
    if options.packing not in ALL_LANES and cut.latest.fits(world) and is_whole:
        return 1.0
    # every rank gets a random part of each chunk, and reads all of it for that
    return world * (1 - (1 - 1 / world) ** chunk)


def _target(layouts: Sequence[Layout], options: LoaderOptions) -> int:
    """Bytes of a group."""
    # On a device only Python's time per group counts: 32 MiB of tokens pass in 0.6 ms at the speed of PCIe 5.
    if str(options.device).startswith("cuda"):
        return options.memory // 4
    if options.workers == "inline":
        return _INLINE_GROUP_BYTES
    if all(isinstance(one, Windows) and one.dtype == token_dtype(layouts, options) for one in layouts):
        return max(_GROUP_BYTES, min(_COPIED_GROUP_BYTES, options.memory // 16))
    return _GROUP_BYTES


def make_layouts(
    datasets: Sequence[AnyDataset], options: LoaderOptions
) -> tuple[Sequence[Layout], Sequence[AnyDataset]]:
    if len({(type(dataset), dataset.is_tokens) for dataset in datasets}) > 1:
        raise UsageError(
            "tokens, tars and other datasets cannot be blended", hint="give datasets of one format"
        )
    if len(datasets) > 1:
        return [_layout(dataset, options, 0) for dataset in datasets], datasets
    epochs = datasets[0].epochs
    return [_layout(datasets[0], options, epoch) for epoch in range(epochs)], [datasets[0]] * epochs


def _layout(dataset: AnyDataset, options: LoaderOptions, epoch: int) -> Layout:
    if options.decodes and (isinstance(dataset, ItemsDataset) or dataset.is_tokens):
        raise UsageError(
            f"{options.decodes} decodes members of WebDataset tars, and {dataset.name} is none",
            hint="`stoker prepare` makes tars of media, `stoker prepare index` adopts those there are; or "
            "decode in `transform`",
        )
    if isinstance(dataset, ItemsDataset):
        if options.packing != "concat" or options.documents:
            raise UsageError(
                f"packing={options.packing!r} and documents={options.documents} need documents, and "
                f"{dataset.name} does not say where they begin",
                hint="use a prepared dataset (`stoker prepare`), or what the dataset itself packs",
            )
        if not dataset.has_ids:
            _check_tokens(dataset, options)
        return dataset.layout(seq_len=options.seq_len, dtype=options.dtype, labels=options.labels)
    if not dataset.is_tokens:
        _check_tokens(dataset, options)
        return dataset.samples(epoch)
    _check_samples(dataset, options)
    if options.seq_len < 1:
        raise UsageError("token data needs seq_len", hint="pass seq_len=2048, or what your model takes")
    return (
        dataset.windows(options.seq_len, epoch) if options.packing == "concat" else dataset.documents(epoch)
    )


def _check_tokens(dataset: AnyDataset, options: LoaderOptions) -> None:
    """Samples come as they are: what is said of tokens would change nothing, without a word. (`seq_len` says
    how long their rows are, to meshes and mixtures.)"""
    for option in fields(LoaderOptions):
        if option.name in _OF_TOKENS and getattr(options, option.name) != option.default:
            raise UsageError(
                f"{option.name}={getattr(options, option.name)!r} has nothing to work on: {dataset.name} "
                "holds samples, not token ids",
                hint="leave it out, and let the dataset or `transform` make of samples what they should be",
            )


_OF_TOKENS = ("labels", "dtype", "pad_id")


def _check_samples(dataset: Dataset, options: LoaderOptions) -> None:
    """Rows of tokens are gathered many at once: no sample of them is ever an object by itself."""
    for name in ("transform", "collate"):
        if getattr(options, name) is not None:
            raise UsageError(
                f"{name}= has nothing to work on: {dataset.name} holds tokens, made into whole batches",
                hint="change batches in the loop, or give samples: tars, or what has __len__ and __getitem__",
            )


def _order(layout: Layout, options: LoaderOptions, number: int, cut: Cut) -> Order:
    chunk, window = max(1, round(options.chunk_bytes / max(1.0, layout.sample_bytes))), options.window
    if isinstance(layout, ItemsLayout):
        chunk, window = _ITEMS_CHUNK, max(window, _ITEMS_WINDOW)
    return Order(
        samples=layout.samples,
        chunk=chunk,
        cut=replace(cut, then=()),
        window=window,
        stretch=max(1, round(STRETCH_BYTES / max(1.0, chunk * layout.sample_bytes))),
        seed=key_of(options.seed, number),
        shuffle=options.shuffle,
        dataset=number,
    )


def lanes_for(
    orders: tuple[Order, ...], options: LoaderOptions, cut: Cut, dealing: Dealing, share: Share
) -> Sequence[Elastic | Blend]:
    """Where positions lead: of each layout, or of the blend."""
    if dealing.datasets > 1:
        return [make_blend(orders, dealing, share=share)]
    return [Elastic(order, cut) for order in orders]


def planner_for(
    layouts: Sequence[Layout],
    lanes: Sequence[Elastic | Blend],
    options: LoaderOptions,
    share: Share,
    left_out: Sequence[LeftOut] = (),
) -> Planner:
    lengths = _lengths([layout for layout in layouts if isinstance(layout, Documents)])
    if options.packing == "best-fit" and isinstance(layouts[0], Documents):
        kept = kept_parts(left_out) if left_out else None
        return EpochsPlanner(
            [
                BestFitPlanner(
                    one, share, seq_len=options.seq_len, lengths=lengths, seed=options.seed, kept=kept
                )
                for one in lanes
            ]
        )

    def arranged(order: Ordered) -> Ordered:
        is_sorted = options.packing == "buckets" and isinstance(layouts[0], Documents)
        return Sorted(order, lengths, seed=options.seed) if is_sorted else order

    def make(order: Ordered) -> Planner:
        return FixedPlanner(order, share, tail=options.tail)

    if not left_out:
        return EpochsPlanner([make(arranged(one)) for one in lanes])
    of_each = [of_layout(left_out, None if len(lanes) < len(layouts) else n) for n in range(len(lanes))]
    return EpochsPlanner(
        [
            LeavingOut(one, share, some, make=make, arranged=arranged)
            for one, some in zip(lanes, of_each, strict=True)
        ]
    )


def _lengths(layouts: Sequence[Documents]) -> Lengths:
    """How long documents are, whichever dataset they are of."""

    def lengths(draw: Draw) -> Integers:
        used = sorted({key[0] for key in draw.keys})
        if len(used) == 1:
            return layouts[used[0]].lengths(draw.sample)
        found, dataset = np.empty(len(draw), np.int64), draw.dataset
        for which in used:
            mine = dataset == which
            found[mine] = layouts[which].lengths(draw.sample[mine])
        return found

    return lengths


def share_of(options: LoaderOptions) -> Share:
    return Share(rank=options.place.rank, world=options.place.size, batch=options.batch_size)


def _batch_bytes(layouts: Sequence[Layout], options: LoaderOptions) -> int:
    if isinstance(layouts[0], (Windows, Documents)):
        return options.batch_size * (options.seq_len + 1) * token_dtype(layouts, options).itemsize
    decoded = sum(one.size**2 * 3 for one in options.images.values() if one.crop != "whole")
    if options.audio and options.audio.crop != "whole":
        decoded += options.audio.channels * options.audio.samples * 4
    if options.video and options.video.crop != "whole":
        decoded += options.video.frames * options.video.size**2 * 3
    return max(1, int(options.batch_size * (decoded + max(layout.sample_bytes for layout in layouts))))


def token_dtype(layouts: Sequence[Any], options: LoaderOptions) -> np.dtype[Any]:
    """Of the ids in a batch: as asked for, or one that holds the ids of every dataset."""
    dtype: np.dtype[Any] = np.dtype(options.dtype or np.result_type(*(layout.dtype for layout in layouts)))
    return dtype


def _check_dtype(datasets: Sequence[Dataset], options: LoaderOptions) -> None:
    """A type that cannot hold the ids would give others, without a word."""
    for dataset in (one for one in datasets if one.is_tokens and options.dtype is not None):
        dtype, tokenizer = np.dtype(options.dtype), dataset.manifest.tokenizer
        fits = np.can_cast(dataset.dtype, dtype)
        if not fits and dtype.kind in "iu" and tokenizer is not None:
            fits = tokenizer.vocabulary - 1 <= np.iinfo(dtype).max
        if not fits:
            raise UsageError(
                f"dtype={dtype.name} cannot hold all ids of {dataset.name}, which are {dataset.dtype.name}",
                hint="use dtype=None for as they are on disk, or a wider one",
            )
    dtype = np.dtype(options.dtype or np.result_type(*(d.dtype for d in datasets if d.is_tokens), np.uint8))
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= options.pad_id <= np.iinfo(dtype).max:
        raise UsageError(
            f"pad_id={options.pad_id} does not fit into {dtype.name}",
            hint="use another pad_id, or a wider dtype",
        )


def _slots(options: LoaderOptions, cut: Cut, *, blended: int) -> int:
    """A chunk for every lane this rank reads, and some to read ahead."""
    world = options.place.size
    latest = cut.latest
    own = latest.lanes // world if latest.fits(world) else latest.lanes
    own = max(own, *(recut.lanes // world for recut in cut.then)) if cut.then else own
    if options.shuffle == "off" and blended == 1:
        own = 1
    elif options.packing in ALL_LANES:
        own = latest.lanes
    return own * options.window * blended + SPARE


def slot_bytes(layouts: Sequence[Layout], chunks: Sequence[int]) -> list[int]:
    return [
        layout.chunk_bytes(chunk) if isinstance(layout, Windows) else int(layout.sample_bytes * chunk)
        for layout, chunk in zip(layouts, chunks, strict=True)
    ]
