"""Engines of a device: windows of tokens that are gathered there, and images that a card decodes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np

from stoker.errors import UsageError
from stoker.load.assemblers import beside, make_assembler, media_of, threads_of
from stoker.load.assembly.rows import Batch
from stoker.load.device.pinned import PageCache, spare_memory
from stoker.load.engine import Engine, asked_in, closer, cufile_of, is_coming
from stoker.load.options import LoaderOptions
from stoker.load.parts import Parts, slot_bytes
from stoker.load.pool import NativePool, open_pool
from stoker.load.prefetch.pipeline import Maker
from stoker.load.reading.chunks import ChunkLoader
from stoker.load.store import Store
from stoker.machine.allowed import usable_cores

_READERS = 8  # threads in C: that many reach the copy ceiling of an H200


def images_engine(
    parts: Parts, options: LoaderOptions, store: Store, finish: Callable[[Batch], Batch]
) -> Engine | None:
    """Samples whose images are made on a card; none where they cannot be."""
    image = next(iter(options.images.values()))
    is_chosen = image.engine == "nvjpeg"
    why = _why_no_card(options)
    if why and not is_chosen:
        return None
    from stoker.load.device import pictures, streams  # homes of torch

    on = streams.Device(str(options.device or "cpu"), is_hurried=True)
    card = why or pictures.open_card(
        on, max_pixels=image.max_pixels, is_chosen=is_chosen, threads=threads_of(options)
    )
    if isinstance(card, str):
        if is_chosen:
            raise UsageError(
                f'Image(engine="nvjpeg") cannot work here: {card}',
                hint='use engine="auto", which takes what there is',
            )
        return None
    media = media_of(options, card)
    arrivals, copier = streams.Arrivals(on), streams.Copier(on)

    def moved(batch: Batch) -> Batch:
        with on.gathering():
            return copier.moved(finish(batch))

    def close() -> None:
        closer(store, media.members)()
        card.close()

    assembler = make_assembler(parts, store, options, None, media, on.gathering)
    maker = Maker(
        parts.planner,
        store.for_keys,
        assembler,
        group=parts.group,
        order=asked_in(parts),
        finish=moved,
        made=arrivals.made,
        is_coming=partial(is_coming, parts),
    )
    return Engine(
        maker=maker,
        store=store,
        assembler=assembler,
        accept=arrivals.accept,
        reader=lambda: cufile_of(options, is_cuda=False).reason,
        read_with=store.read_with,
        close=close,
        on_device=True,
        media=media,
    )


def _why_no_card(options: LoaderOptions) -> str:
    """Why images are not decoded by a card."""
    engine = next(iter(options.images.values())).engine
    reasons = {
        f'engine="{engine}" was asked for': engine not in ("auto", "nvjpeg"),
        "batches do not go to a CUDA device": not options.device or options.output == "numpy",
        "a transform or a collate wants them on the host": bool(options.transform or options.collate),
        'images of their own sizes (crop="whole") are decoded on the host': any(
            one.crop == "whole" for one in options.images.values()
        ),
        "sound and video beside them are decoded on the host": bool(options.audio or options.video),
        'workers="process" have no card': options.workers == "process",
        "ranks of a mesh cut their part on the host": options.mesh is not None,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def windows_engine(parts: Parts, options: LoaderOptions, threads: Executor | None) -> Engine:
    from stoker.load.device import (
        card,
        streams,
    )  # the homes of torch, not needed by those who load into numpy

    on = streams.Device(str(options.device))
    opened = cufile_of(options, on.is_cuda)
    readers = options.readers or min(_READERS, usable_cores())
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
        documents=beside(parts) if options.documents else None,
    )
    arrivals = streams.Arrivals(on)
    maker = Maker(
        parts.planner,
        store.for_keys,
        assembler,
        group=parts.group,
        in_turn=True,
        order=asked_in(parts),
        made=arrivals.made,
        is_coming=partial(is_coming, parts),
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
