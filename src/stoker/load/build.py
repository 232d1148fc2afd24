"""From options to parts: which layouts, order, planner, cache and assembler a loader is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stoker.errors import UsageError
from stoker.load.batch import Arena, Assembler, Batch, WindowAssembler
from stoker.load.documents import DocumentAssembler
from stoker.load.options import LoaderOptions
from stoker.load.pipeline import Maker
from stoker.load.samples import SampleAssembler
from stoker.ordering.blend import check_weights, make_blend
from stoker.ordering.order import Cut, Key, Order, Share
from stoker.ordering.plan import BestFitPlanner, EpochsPlanner, FixedPlanner, Planner
from stoker.reading.chunks import Chunk, ChunkCache, ChunkLoader, in_threads
from stoker.reading.cufile import Opened, open_cufile
from stoker.reading.dataset import Dataset
from stoker.reading.layout import Documents, Layout, Windows
from stoker.world import usable_cores

# Rows gathered at once: smaller pays Python per group (2.8 ns of CPU a token at 2 MiB, 2.3 at 4, 2.2 at 6),
# larger costs memory.
_GROUP_BYTES = 4 << 20

_DEVICE_READERS = 8  # threads in C: that many reach the copy ceiling of an H200

# Read before a lane goes elsewhere: a good part of a shard. While shards are still on their way to this node,
# each lane waits for the one or two that a stretch lies in.
STRETCH_BYTES = 256 << 20

_SPARE = 4  # chunks read ahead
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
    alone: bool
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
    group = 1 if options.packing == "best-fit" else max(1, min(64, _target(options) // batch_bytes))
    used_up = -(-group * options.batch_size // min(chunks))
    slots = _slots(options, cut.lanes, blended=len(datasets)) + _GROUPS_AHEAD * used_up
    return Parts(
        planner=_planner(layouts, orders, weights, options, blended=len(datasets) > 1),
        orders=orders,
        layouts=layouts,
        datasets=owners,
        chunks=chunks,
        slots=slots,
        alone=_too_large(layouts, slots * max(_slot_bytes(layouts, chunks)), options),
        group=group,
        batch_bytes=batch_bytes,
        ahead=min(64, -(-max(chunks) // (group * options.batch_size))),
    )


def _target(options: LoaderOptions) -> int:
    # On a device only Python's time per group counts: 32 MiB of tokens pass in 0.6 ms at the speed of PCIe 5.
    return options.memory // 4 if options.device.startswith("cuda") else _GROUP_BYTES


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
        return options.batch_size * (options.seq_len + 1) * _token_dtype(layouts, options).itemsize
    return max(1, int(options.batch_size * max(layout.sample_bytes for layout in layouts)))


def _token_dtype(layouts: Sequence[Any], options: LoaderOptions) -> np.dtype[Any]:
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
    return own * options.window * blended + _SPARE


def _slot_bytes(layouts: Sequence[Layout], chunks: Sequence[int]) -> list[int]:
    return [
        layout.chunk_bytes(chunk) if isinstance(layout, Windows) else int(layout.sample_bytes * chunk)
        for layout, chunk in zip(layouts, chunks, strict=True)
    ]


def _too_large(layouts: Sequence[Layout], chunk_bytes: int, options: LoaderOptions) -> bool:
    """When the chunks of all lanes do not fit the budget, windows are read one by one."""
    return chunk_bytes > options.memory * 3 // 4 and isinstance(layouts[0], Windows)


class Store:
    """The chunks of one epoch's layouts: an arena for windows, memory of their own for the rest. Grows
    when a group needs more chunks than there are slots."""

    def __init__(self, parts: Parts, *, batch_rows: int, threads: Executor | None) -> None:
        self._threads, self._parts = threads, parts
        self._loaders = [
            ChunkLoader(layout, dataset.reader)
            for layout, dataset in zip(parts.layouts, parts.datasets, strict=True)
        ]
        self._slot_bytes = self._bytes_per_slot()
        self._fixed = isinstance(parts.layouts[0], Windows)
        self.arena: Arena | None = None
        self.cache = self._sized(2 * parts.group * batch_rows if parts.alone else parts.slots)

    def for_keys(self, count: int) -> ChunkCache:
        if count > self.cache.slots:
            self.cache = self._sized(count + _SPARE)
        return self.cache

    def current_arena(self) -> Arena:
        assert self.arena is not None
        return self.arena

    @property
    def bytes(self) -> int:
        return self.arena.bytes if self.arena else self.cache.slots * self._slot_bytes

    def _bytes_per_slot(self) -> int:
        if self._parts.alone:
            return max(layout.chunk_bytes(1) for layout in self._parts.layouts if isinstance(layout, Windows))
        return max(_slot_bytes(self._parts.layouts, self._parts.chunks))

    def _sized(self, slots: int) -> ChunkCache:
        arena = self.arena = Arena(slots, self._slot_bytes) if self._fixed else None

        # a load asked of an earlier, smaller cache may still come: it must write into the arena it knew
        def load(key: Key, slot: int) -> Chunk:
            return self._loaders[key[0]].load(key, slot, arena.slot(slot) if arena else None)

        return ChunkCache(in_threads(load, self._threads), slots=slots)


def make_assembler(parts: Parts, store: Store, options: LoaderOptions) -> Assembler:
    layouts: Any = parts.layouts  # all of one kind, as sample_layouts made them
    if isinstance(layouts[0], Windows):
        return WindowAssembler(
            layouts,
            store.current_arena,
            batch_size=options.batch_size,
            dtype=_token_dtype(layouts, options),
            labels=options.labels,
            documents=_beside(parts) if options.documents else None,
            wrap=_wrapper(options.output),
        )
    if isinstance(layouts[0], Documents):
        return DocumentAssembler(
            layouts,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
            dtype=_token_dtype(layouts, options),
            pad_id=options.pad_id,
            labels=options.labels,
            trim=options.packing == "buckets",
        )
    return SampleAssembler(
        layouts, batch_size=options.batch_size, transform=options.transform, collate=options.collate
    )


def _nothing(batch: Batch) -> Batch:
    return batch


def _wrapper(output: str) -> Callable[[Any], Any]:
    if output == "numpy":
        return lambda array: array
    from stoker.load.device import as_tensor  # a home of torch

    return as_tensor


class AnyStore(Protocol):
    """Chunks on the host or on a device."""

    @property
    def bytes(self) -> int: ...
    def for_keys(self, count: int) -> ChunkCache: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A maker of groups and what it works with; `accept` takes a group over into the consumer's stream."""

    maker: Maker
    store: AnyStore
    assembler: Assembler
    accept: Callable[[Sequence[Batch], Any], None]
    reader: Callable[[], str]  # how bytes are read, which may change while they are
    close: Callable[[], None] = lambda: None
    on_device: bool = False


def make_engine(
    parts: Parts, options: LoaderOptions, *, threads: Executor | None, finish: Callable[[Batch], Batch]
) -> Engine:
    if options.device and isinstance(parts.layouts[0], Windows) and options.workers != "process":
        return _device_engine(parts, options, threads)
    store = Store(parts, batch_rows=options.batch_size, threads=threads)
    assembler = make_assembler(parts, store, options)
    if isinstance(assembler, WindowAssembler):  # it wraps groups, not batches
        finish = _nothing
    maker = Maker(
        parts.planner, store.for_keys, assembler, group=parts.group, alone=parts.alone, finish=finish
    )
    return Engine(
        maker=maker,
        store=store,
        assembler=assembler,
        accept=lambda batches, ready: None,
        reader=lambda: _cufile(options, is_cuda=False).reason,
    )


def _device_engine(parts: Parts, options: LoaderOptions, threads: Executor | None) -> Engine:
    from stoker.load import card, device  # the homes of torch, not needed by those who load into numpy

    on = device.Device(options.device)
    opened = _cufile(options, on.is_cuda)
    readers = options.readers or min(_DEVICE_READERS, usable_cores())
    loaders = [
        ChunkLoader(layout, dataset.reader)
        for layout, dataset in zip(parts.layouts, parts.datasets, strict=True)
    ]
    store = card.DeviceStore(
        loaders,
        on,
        slots=parts.slots + 2 * readers,
        slot_bytes=max(_slot_bytes(parts.layouts, parts.chunks)),
        threads=threads,
        readers=readers,
        cufile=opened,
    )
    windows: Any = parts.layouts
    assembler = card.DeviceWindows(
        windows,
        store,
        batch_size=options.batch_size,
        dtype=np.dtype(options.dtype or np.int64),
        labels=options.labels,
        documents=_beside(parts) if options.documents else None,
    )
    arrivals = device.Arrivals(on)
    maker = Maker(parts.planner, store.for_keys, assembler, group=parts.group, made=arrivals.made)
    return Engine(
        maker=maker,
        store=store,
        assembler=assembler,
        accept=arrivals.accept,
        reader=lambda: store.cufile.reason,
        close=store.close,
        on_device=True,
    )


def _cufile(options: LoaderOptions, is_cuda: bool) -> Opened:
    if options.reader != "cufile":
        reader = "pread" if is_cuda and options.reader == "mmap" else options.reader
        return Opened(cufile=None, reason=reader)
    if not is_cuda:
        return Opened(cufile=None, reason="cufile needs a CUDA device: reading with pread")
    return open_cufile()


def _beside(parts: Parts) -> list[Documents]:
    """The documents that windows are cut from, for those who ask where each one starts."""
    blended = len({id(dataset) for dataset in parts.datasets}) > 1
    return [dataset.documents(0 if blended else epoch) for epoch, dataset in enumerate(parts.datasets)]
