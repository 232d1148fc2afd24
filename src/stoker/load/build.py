"""Engine selection: which store, readers, assembler and pipeline a set of loader options yields.

    data and options                     chunks lie in            batches are made by
    -----------------------------------  -----------------------  -----------------------------------------
    tokens, packing="concat"             store.Store              assembly.batch.WindowAssembler
    the same, device set, no processes   device.card.DeviceStore  device.card.DeviceWindows, on the device
    tokens, "pad" "buckets" "best-fit"   store.Store              assembly.documents.DocumentAssembler
    WebDataset tars                      store.Store              assembly.samples.SampleAssembler
    the same, image, audio, video set    store.Store              the same, with media.members.Members
    a map-style dataset, an array        nowhere                  assembly.items.ItemAssembler

    who reads a chunk (the first that holds)
    -----------------------------------------------------------------------------------------------------
    workers="inline"                 the caller's thread
    "concat" on the host             threads in C (`pool`) where built, unless reader="mmap"; else as below
    "concat" on a CUDA device        cuFile for reader="cufile" where it opens; else threads in C, for
                                     reader="mmap" out of the pinned page cache (`device.pinned`)
    everything else                  Python's threads; to a device through pinned stages (`device.pump`)

    workers=    "thread" (default): prefetch.pipeline.Background    "inline": prefetch.pipeline.Inline
                "process": prefetch.workers.Processes, each with an engine on the host of its own

What the threads in C cannot read (a file still to be fetched, blocks they cannot verify) Python's read. Where
`memory` does not hold a chunk for every lane, windows are read one by one (`Parts.alone`). What is not made
on the device `feeder` copies there, batch by batch (`device.streams.Copier`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from stoker.formats.sizes import counted
from stoker.load.assembly.batch import Assembler, WindowAssembler
from stoker.load.assembly.documents import DocumentAssembler
from stoker.load.assembly.items import ItemAssembler, NoChunks
from stoker.load.assembly.rows import Batch
from stoker.load.assembly.samples import SampleAssembler
from stoker.load.assembly.transform import Transforms
from stoker.load.device.pinned import PageCache, spare_memory
from stoker.load.media.choose import NO_MEDIA, Media, choose_media
from stoker.load.media.members import Members
from stoker.load.options import LoaderOptions
from stoker.load.ordering.draw import Draw, Key
from stoker.load.parts import ALL_LANES, MOST_READERS, Parts, slot_bytes, token_dtype
from stoker.load.pool import NativePool, open_pool
from stoker.load.prefetch.pipeline import Maker
from stoker.load.prefetch.tune import Limits
from stoker.load.reading.chunks import ChunkLoader, Chunks
from stoker.load.reading.cufile import Opened, open_cufile
from stoker.load.reading.dataset import Dataset
from stoker.load.reading.items import ItemsLayout
from stoker.load.reading.layout import Documents, Windows
from stoker.load.store import Store
from stoker.machine.allowed import usable_cores

# Gathered when it is asked for, by a loop without threads (in turns with whole groups: 1 MiB 0.94, 1.5 to
# 3 MiB 1.03 to 1.08 of their speed).
_AT_ONCE_BYTES = 2 << 20
_READS_WARNED_OF = 1.3  # times that all ranks together read a sample
_DEVICE_READERS = 8  # threads in C: that many reach the copy ceiling of an H200


def make_assembler(
    parts: Parts,
    store: Store,
    options: LoaderOptions,
    transforms: Transforms | None,
    media: Media,
) -> Assembler:
    layouts: Any = parts.layouts  # all of one kind, as sample_layouts made them
    if isinstance(layouts[0], Windows):
        return WindowAssembler(
            layouts,
            store.current_arena,
            batch_size=options.batch_size,
            dtype=token_dtype(layouts, options),
            labels=options.labels,
            documents=_beside(parts) if options.documents else None,
            wrap=_wrapper(options.output),
            at_once=_at_once(parts) if options.workers == "inline" else 0,
        )
    if isinstance(layouts[0], Documents):
        return DocumentAssembler(
            layouts,
            batch_size=options.batch_size,
            seq_len=options.seq_len,
            dtype=token_dtype(layouts, options),
            pad_id=options.pad_id,
            labels=options.labels,
            trim=options.packing == "buckets",
            packed=options.packing == "best-fit",
        )
    return SampleAssembler(
        layouts,
        batch_size=options.batch_size,
        transforms=transforms,
        collate=options.collate,
        media=media.members,
    )


def _transforms(options: LoaderOptions) -> Transforms | None:
    if options.transform is None:
        return None
    return Transforms(options.transform, threads=_threads(options))


def _media(options: LoaderOptions) -> Media:
    return choose_media(
        options.images,
        audio=options.audio,
        video=options.video,
        seed=options.seed,
        on_corrupt=options.on_corrupt,
        threads=_threads(options),
        transform=options.transform,
    )


def _threads(options: LoaderOptions) -> int:
    return (options.threads or usable_cores()) if options.workers == "thread" else 1


def _at_once(parts: Parts) -> int:
    return max(1, _AT_ONCE_BYTES // parts.batch_bytes)


def _wrapper(output: str) -> Callable[[Any], Any]:
    if output == "numpy":
        return lambda array: array
    from stoker.load.device.streams import as_tensor  # a home of torch

    return as_tensor


class AnyStore(Protocol):
    """Chunks on the host or on a device."""

    @property
    def cache(self) -> Chunks: ...
    @property
    def bytes(self) -> int: ...
    def for_keys(self, count: int) -> Chunks: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """A maker of groups and what it works with; `accept` takes a group over into the consumer's stream."""

    maker: Maker
    store: AnyStore
    assembler: Assembler
    accept: Callable[[Sequence[Batch], Any], None]
    reader: Callable[[], str]  # how bytes are read, which may change while they are
    read_with: Callable[[int], None] = lambda readers: None
    close: Callable[[], None] = lambda: None
    on_device: bool = False
    media: Media = NO_MEDIA


def make_engine(
    parts: Parts,
    options: LoaderOptions,
    *,
    threads: Executor | None,
    most_readers: int,
    finish: Callable[[Batch], Batch],
) -> Engine:
    if options.device and isinstance(parts.layouts[0], Windows) and options.workers != "process":
        return _device_engine(parts, options, threads)
    in_c = threads is not None and options.reader != "mmap" and isinstance(parts.layouts[0], Windows)
    if parts.alone:
        _warn_of_alone(parts, options)
    if isinstance(parts.layouts[0], ItemsLayout):
        return _items_engine(parts, options, finish)
    store = Store(parts, batch_rows=options.batch_size, threads=threads, native=most_readers if in_c else 0)
    media = _media(options)  # whose threads run the transform too, sample by sample
    transforms = None if media.members else _transforms(options)
    assembler = make_assembler(parts, store, options, transforms, media)
    maker = Maker(
        parts.planner,
        store.for_keys,
        assembler,
        group=parts.group,
        alone=parts.alone,
        order=_asked_in(parts),
        finish=None if isinstance(assembler, WindowAssembler) else finish,  # it wraps groups, not batches
        is_coming=partial(_is_coming, parts),
    )
    return Engine(
        maker=maker,
        store=store,
        assembler=assembler,
        accept=lambda batches, ready: None,
        reader=lambda: _cufile(options, is_cuda=False).reason,
        read_with=store.read_with,
        close=_closer(store, media.members or transforms),
        media=media,
    )


def _items_engine(parts: Parts, options: LoaderOptions, finish: Callable[[Batch], Batch]) -> Engine:
    layouts: Any = parts.layouts
    store, transforms = NoChunks(), _transforms(options)
    assembler = ItemAssembler(
        layouts, batch_size=options.batch_size, transforms=transforms, collate=options.collate
    )
    return Engine(
        maker=Maker(parts.planner, store.for_keys, assembler, group=parts.group, finish=finish),
        store=store,
        assembler=assembler,
        accept=lambda batches, ready: None,
        reader=lambda: "the dataset's own",
        close=_closer(None, transforms),
    )


def _closer(store: Store | None, transforms: Transforms | Members | None) -> Callable[[], None]:
    def close() -> None:
        if transforms:
            transforms.close()
        if store:
            store.close()

    return close


def _asked_in(parts: Parts) -> Callable[[Draw], Sequence[Key]]:
    """The order in which chunks are asked for. A cache that cannot hold all files lets go of them by when
    they come next (`needs`): what it was told must be what is read. Elsewhere that need not be found out."""
    datasets = (one for one in parts.datasets if isinstance(one, Dataset))
    if any(one.reader.is_short_of_room for one in datasets):
        return Draw.keys_by_turn
    return lambda draw: draw.keys


def _is_coming(parts: Parts) -> bool:
    return any(one.reader.is_coming for one in parts.datasets if isinstance(one, Dataset))


def limits_of(parts: Parts, options: LoaderOptions) -> Limits:
    """How far the prefetch may be tuned up: a quarter of the memory is for groups that are ready."""
    groups = (options.memory // 4) // (parts.batch_bytes * parts.group)
    return Limits(
        depth=max(2, min(16, groups)),
        readers=options.readers or parts.in_flight,
        cores=usable_cores(),
        why=_why_no_more(parts, options),
        fetched=any(isinstance(one, Dataset) and one.reader.is_cached for one in parts.datasets),
    )


def _why_no_more(parts: Parts, options: LoaderOptions) -> str:
    """What keeps reads at once from being more."""
    if options.readers:
        return f"readers={options.readers} was asked for"
    if parts.in_flight < MOST_READERS:
        return f"memory={options.memory >> 20} MiB has room for {parts.in_flight} chunks on their way"
    return f"{MOST_READERS} at once are the most"


def warn_of_reads(factor: float, options: LoaderOptions, lanes: int) -> None:
    """Where ranks cannot keep to lanes of their own although they could, with other lanes."""
    if factor <= _READS_WARNED_OF or options.shuffle == "off" or options.packing in ALL_LANES:
        return
    warnings.warn(
        f"{counted(options.place.size, 'rank')} cannot share {counted(lanes, 'lane')} out: all together they "
        f"read every sample {factor:.1f} times; leave lanes= out, or give a multiple of the ranks",
        RuntimeWarning,
        stacklevel=2,
    )


def _warn_of_alone(parts: Parts, options: LoaderOptions) -> None:
    wanted = -(-parts.memory_wanted >> 20)
    warnings.warn(
        f"memory={options.memory >> 20} MiB is too little for chunks of {options.chunk_bytes >> 10} KiB in "
        "every lane: windows are read one by one, which is slow; "
        f"give memory={wanted} << 20, or smaller chunk_bytes",
        RuntimeWarning,
        stacklevel=2,
    )


def _device_engine(parts: Parts, options: LoaderOptions, threads: Executor | None) -> Engine:
    from stoker.load.device import (
        card,
        streams,
    )  # the homes of torch, not needed by those who load into numpy

    on = streams.Device(str(options.device))
    opened = _cufile(options, on.is_cuda)
    readers = options.readers or min(_DEVICE_READERS, usable_cores())
    loaders = [
        ChunkLoader(layout, dataset.reader)
        for layout, dataset in zip(parts.layouts, parts.datasets, strict=True)
    ]
    pool = None
    if on.is_cuda and threads and not opened.cufile:
        pool = open_pool(
            threads=readers,
            block_bytes=max(loader.block_bytes for loader in loaders),
            device=on.torch_device.index,
            stream=on.copy_stream,
        )
    store = card.DeviceStore(
        loaders,
        on,
        slots=parts.slots + 2 * readers,
        slot_bytes=max(slot_bytes(parts.layouts, parts.chunks)),
        threads=threads,
        pool=pool,
        page_cache=_page_cache(pool, options) if pool else None,
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
    arrivals = streams.Arrivals(on)
    maker = Maker(
        parts.planner,
        store.for_keys,
        assembler,
        group=parts.group,
        in_turn=True,
        order=_asked_in(parts),
        made=arrivals.made,
        is_coming=partial(_is_coming, parts),
    )
    return Engine(
        maker=maker,
        store=store,
        assembler=assembler,
        accept=arrivals.accept,
        reader=store.reader,
        close=store.close,
        on_device=True,
    )


def _page_cache(pool: NativePool, options: LoaderOptions) -> PageCache | None:
    if options.reader != "mmap":
        return None
    return PageCache(pool, room=spare_memory() // options.place.local_size)


def _cufile(options: LoaderOptions, is_cuda: bool) -> Opened:
    if options.reader != "cufile":
        reader = "pread" if options.device and options.reader == "mmap" else options.reader
        return Opened(cufile=None, reason=reader)
    if not is_cuda:
        return Opened(cufile=None, reason="cufile needs a CUDA device: reading with pread")
    return open_cufile()


def _beside(parts: Parts) -> list[Documents]:
    """The documents that windows are cut from, for those who ask where each one starts."""
    blended = len({id(dataset) for dataset in parts.datasets}) > 1
    return [dataset.documents(0 if blended else epoch) for epoch, dataset in enumerate(parts.datasets)]
