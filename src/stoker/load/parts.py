"""From options to what a loader is made of: layouts, orders, a planner, and the memory that chunks take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.load.options import LoaderOptions
from stoker.ordering.blend import check_weights, make_blend
from stoker.ordering.order import Cut, Order, Share
from stoker.ordering.plan import BestFitPlanner, EpochsPlanner, FixedPlanner, Planner
from stoker.reading.dataset import Dataset
from stoker.reading.layout import Documents, Layout, Windows

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

SPARE = 4  # chunks read ahead
_GROUPS_AHEAD = 3  # and, beside those, what so many groups of batches use up


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """What a loader is made of. `layouts` has one entry per dataset of a blend, or per epoch on disk."""

    planner: Planner
    orders: Sequence[Order]
    layouts: Sequence[Layout]
    datasets: Sequence[Dataset]
    chunks: Sequence[int]
    slots: int
    memory_wanted: int  # for the chunks of all lanes
    alone: bool  # they do not get it, so windows are read one by one
    group: int
    batch_bytes: int
    ahead: int


def make_parts(
    datasets: Sequence[Dataset], options: LoaderOptions, *, weights: Sequence[float], cut: Cut
) -> Parts:
    check_weights(len(datasets), tuple(weights))
    layouts, owners = _layouts(datasets, options)
    orders = tuple(_order(layout, options, number, cut) for number, layout in enumerate(layouts))
    chunks = [order.chunk for order in orders]
    batch_bytes = _batch_bytes(layouts, options)
    group = 1 if options.packing == "best-fit" else max(1, min(128, _target(layouts, options) // batch_bytes))
    used_up = -(-group * options.batch_size // min(chunks))
    groups = 1 if options.workers == "inline" else _GROUPS_AHEAD
    slots = _slots(options, cut.lanes, blended=len(datasets)) + groups * used_up
    memory_wanted = slots * max(slot_bytes(layouts, chunks)) * 4 // 3  # the rest is for batches in waiting
    return Parts(
        planner=_planner(layouts, orders, weights, options, blended=len(datasets) > 1),
        orders=orders,
        layouts=layouts,
        datasets=owners,
        chunks=chunks,
        slots=slots,
        memory_wanted=memory_wanted,
        alone=memory_wanted > options.memory and isinstance(layouts[0], Windows),
        group=group,
        batch_bytes=batch_bytes,
        ahead=min(64, -(-max(chunks) // (group * options.batch_size))),
    )


def _target(layouts: Sequence[Layout], options: LoaderOptions) -> int:
    """Bytes of a group."""
    # On a device only Python's time per group counts: 32 MiB of tokens pass in 0.6 ms at the speed of PCIe 5.
    if options.device.startswith("cuda"):
        return options.memory // 4
    if options.workers == "inline":
        return _INLINE_GROUP_BYTES
    if all(isinstance(one, Windows) and one.dtype == token_dtype(layouts, options) for one in layouts):
        return max(_GROUP_BYTES, min(_COPIED_GROUP_BYTES, options.memory // 16))
    return _GROUP_BYTES


def _layouts(
    datasets: Sequence[Dataset], options: LoaderOptions
) -> tuple[Sequence[Layout], Sequence[Dataset]]:
    if len({dataset.is_tokens for dataset in datasets}) > 1:
        raise UsageError("tokens and tars cannot be blended", hint="give datasets of one format")
    if len(datasets) > 1:
        return [_layout(dataset, options, 0) for dataset in datasets], datasets
    epochs = max(1, datasets[0].manifest.epochs)
    return [_layout(datasets[0], options, epoch) for epoch in range(epochs)], [datasets[0]] * epochs


def _layout(dataset: Dataset, options: LoaderOptions, epoch: int) -> Layout:
    if not dataset.is_tokens:
        return dataset.samples(epoch)
    if options.seq_len < 1:
        raise UsageError("token data needs seq_len", hint="pass seq_len=2048, or what your model takes")
    return (
        dataset.windows(options.seq_len, epoch) if options.packing == "concat" else dataset.documents(epoch)
    )


def _order(layout: Layout, options: LoaderOptions, number: int, cut: Cut) -> Order:
    chunk = max(1, round(options.chunk_bytes / max(1.0, layout.sample_bytes)))
    return Order(
        samples=layout.samples,
        chunk=chunk,
        cut=cut,
        window=options.window,
        stretch=max(1, round(STRETCH_BYTES / max(1.0, chunk * layout.sample_bytes))),
        seed=options.seed + number,
        shuffle=options.shuffle,
        dataset=number,
    )


def _planner(
    layouts: Sequence[Layout],
    orders: tuple[Order, ...],
    weights: Sequence[float],
    options: LoaderOptions,
    *,
    blended: bool,
) -> Planner:
    if not blended:
        return EpochsPlanner(
            [_one_planner(layout, order, options) for layout, order in zip(layouts, orders, strict=True)]
        )
    if options.packing in ("buckets", "best-fit"):
        raise UsageError(
            f"packing={options.packing!r} takes one dataset", hint="blend with packing='concat' or 'pad'"
        )
    blend = make_blend(orders, tuple(weights), seed=options.seed)
    return FixedPlanner(blend, _share(options), tail=options.tail)


def _one_planner(layout: Layout, order: Order, options: LoaderOptions) -> Planner:
    if not isinstance(layout, Documents) or options.packing == "pad":
        return FixedPlanner(order, _share(options), tail=options.tail)
    if options.packing == "buckets":
        return FixedPlanner(order, _share(options), tail=options.tail, lengths=layout.lengths)
    return BestFitPlanner(order, _share(options), seq_len=options.seq_len, lengths=layout.lengths)


def _share(options: LoaderOptions) -> Share:
    return Share(rank=options.world.rank, world=options.world.size, batch=options.batch_size)


def _batch_bytes(layouts: Sequence[Layout], options: LoaderOptions) -> int:
    if isinstance(layouts[0], (Windows, Documents)):
        return options.batch_size * (options.seq_len + 1) * token_dtype(layouts, options).itemsize
    return max(1, int(options.batch_size * max(layout.sample_bytes for layout in layouts)))


def token_dtype(layouts: Sequence[Any], options: LoaderOptions) -> np.dtype[Any]:
    """Of the ids in a batch: as asked for, or one that holds the ids of every dataset."""
    dtype: np.dtype[Any] = np.dtype(options.dtype or np.result_type(*(layout.dtype for layout in layouts)))
    return dtype


def _slots(options: LoaderOptions, lanes: int, *, blended: int) -> int:
    """A chunk for every lane this rank reads, and some to read ahead."""
    world = options.world.size
    own = lanes // world if lanes % world == 0 else lanes
    if options.shuffle == "off" and blended == 1:
        own = 1
    elif options.packing in ("buckets", "best-fit"):
        own = lanes
    return own * options.window * blended + SPARE


def slot_bytes(layouts: Sequence[Layout], chunks: Sequence[int]) -> list[int]:
    return [
        layout.chunk_bytes(chunk) if isinstance(layout, Windows) else int(layout.sample_bytes * chunk)
        for layout, chunk in zip(layouts, chunks, strict=True)
    ]
