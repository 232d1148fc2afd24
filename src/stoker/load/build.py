"""Engine selection: which store, readers, assembler and pipeline a set of loader options yields.

    data and options                     chunks lie in            batches are made by
    -----------------------------------  -----------------------  -----------------------------------------
    tokens, packing="concat"             store.Store              assembly.batch.WindowAssembler
    the same, device set, no processes   device.card.DeviceStore  device.card.DeviceWindows, on the device
    tokens, "pad" "buckets" "best-fit"   store.Store              assembly.documents.DocumentAssembler
    WebDataset tars                      store.Store              assembly.samples.SampleAssembler
    the same, image, audio, video set    store.Store              the same, with media.members.Members
    images, a CUDA device set            store.Store              the same, with device.pictures.Card
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
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from stoker.formats.sizes import counted
from stoker.load.assemblers import make_assembler, media_of, transforms_of
from stoker.load.assembly.batch import WindowAssembler
from stoker.load.assembly.items import ItemAssembler, NoChunks
from stoker.load.assembly.rows import Batch
from stoker.load.engine import Engine, asked_in, closer, cufile_of, is_coming
from stoker.load.on_device import images_engine, windows_engine
from stoker.load.options import LoaderOptions
from stoker.load.parts import ALL_LANES, MOST_READERS, Parts
from stoker.load.prefetch.pipeline import Maker
from stoker.load.prefetch.tune import Limits, Setting
from stoker.load.reading.dataset import Dataset
from stoker.load.reading.items import ItemsLayout
from stoker.load.reading.layout import Documents, Windows
from stoker.load.store import Store
from stoker.machine.allowed import usable_cores

_WAITING_ON_CARD, _BYTES_OF_PIXEL = 1 << 30, 12  # images that are ready; of a pixel at most
_READS_WARNED_OF = 1.3  # times that all ranks together read a sample


def make_engine(
    parts: Parts,
    options: LoaderOptions,
    *,
    threads: Executor | None,
    most_readers: int,
    finish: Callable[[Batch], Batch],
) -> Engine:
    if options.device and isinstance(parts.layouts[0], Windows) and options.workers != "process":
        return windows_engine(parts, options, threads)
    in_c = threads is not None and options.reader != "mmap" and not isinstance(parts.layouts[0], Documents)
    if parts.alone:
        _warn_of_alone(parts, options)
    if isinstance(parts.layouts[0], ItemsLayout):
        return _items_engine(parts, options, finish)
    store = Store(parts, batch_rows=options.batch_size, threads=threads, native=most_readers if in_c else 0)
    if options.images and (engine := images_engine(parts, options, store, finish)):
        return engine
    media = media_of(options)  # whose threads run the transform too, sample by sample
    transforms = None if media.members else transforms_of(options)
    assembler = make_assembler(parts, store, options, transforms, media)
    maker = Maker(
        parts.planner,
        store.for_keys,
        assembler,
        group=parts.group,
        alone=parts.alone,
        order=asked_in(parts),
        finish=None if isinstance(assembler, WindowAssembler) else finish,  # it wraps groups, not batches
        is_coming=partial(is_coming, parts),
    )
    return Engine(
        maker=maker,
        store=store,
        assembler=assembler,
        accept=lambda batches, ready: None,
        reader=lambda: cufile_of(options, is_cuda=False).reason,
        read_with=store.read_with,
        close=closer(store, media.members or transforms),
        media=media,
    )


def _items_engine(parts: Parts, options: LoaderOptions, finish: Callable[[Batch], Batch]) -> Engine:
    layouts: Any = parts.layouts
    store, transforms = NoChunks(), transforms_of(options)
    assembler = ItemAssembler(
        layouts, batch_size=options.batch_size, transforms=transforms, collate=options.collate
    )
    return Engine(
        maker=Maker(parts.planner, store.for_keys, assembler, group=parts.group, finish=finish),
        store=store,
        assembler=assembler,
        accept=lambda batches, ready: None,
        reader=lambda: "the dataset's own",
        close=closer(None, transforms),
    )


def limits_of(parts: Parts, options: LoaderOptions) -> Limits:
    """How far the prefetch may be tuned up: a quarter of the memory is for groups that are ready."""
    groups = (options.memory // 4) // (parts.batch_bytes * parts.group)
    if options.device and options.images:  # they may wait on a card, which has other uses for its memory
        pixels = sum(one.size**2 for one in options.images.values()) * _BYTES_OF_PIXEL
        groups = min(groups, _WAITING_ON_CARD // (pixels * options.batch_size * parts.group))
    return Limits(
        depth=max(2, min(16, groups)),
        readers=options.readers or parts.in_flight,
        cores=usable_cores(),
        why=_why_no_more(parts, options),
        fetched=any(isinstance(one, Dataset) and one.reader.is_cached for one in parts.datasets),
    )


def first_setting(options: LoaderOptions, limits: Limits) -> Setting:
    """How far ahead to begin with: beside training a card takes 12 to 270 ms for a batch of images."""
    depth = min(limits.depth, 4) if options.device and options.images else 2
    return Setting(depth=depth, readers=options.readers or min(2, limits.readers))


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
