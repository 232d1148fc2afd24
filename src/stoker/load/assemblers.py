"""Assemblers: what makes batches of chunks, by what the data are and what was asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from stoker.load.assembly.batch import Assembler, WindowAssembler
from stoker.load.assembly.documents import DocumentAssembler
from stoker.load.assembly.samples import SampleAssembler
from stoker.load.assembly.transform import Transforms
from stoker.load.media.choose import Media, choose_media
from stoker.load.media.images import Card
from stoker.load.options import LoaderOptions
from stoker.load.parts import Parts, token_dtype
from stoker.load.reading.layout import Documents, Windows
from stoker.load.store import Store
from stoker.machine.allowed import usable_cores

# Gathered when it is asked for, by a loop without threads (in turns with whole groups: 1 MiB 0.94, 1.5 to
# 3 MiB 1.03 to 1.08 of their speed).
_AT_ONCE_BYTES = 2 << 20


def make_assembler(
    parts: Parts,
    store: Store,
    options: LoaderOptions,
    transforms: Transforms | None,
    media: Media,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Assembler:
    layouts: Any = parts.layouts  # all of one kind, as sample_layouts made them
    if isinstance(layouts[0], Windows):
        return WindowAssembler(
            layouts,
            store.current_arena,
            batch_size=options.batch_size,
            dtype=token_dtype(layouts, options),
            labels=options.labels,
            documents=beside(parts) if options.documents else None,
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
        around=around,
    )


def transforms_of(options: LoaderOptions) -> Transforms | None:
    if options.transform is None:
        return None
    return Transforms(options.transform, threads=threads_of(options))


def media_of(options: LoaderOptions, card: Card | None = None) -> Media:
    return choose_media(
        options.images,
        audio=options.audio,
        video=options.video,
        seed=options.seed,
        on_corrupt=options.on_corrupt,
        threads=1 if card else threads_of(options),  # a card has threads of its own
        transform=options.transform,
        card=card,
    )


def threads_of(options: LoaderOptions) -> int:
    return (options.threads or usable_cores()) if options.workers == "thread" else 1


def _at_once(parts: Parts) -> int:
    return max(1, _AT_ONCE_BYTES // parts.batch_bytes)


def _wrapper(output: str) -> Callable[[Any], Any]:
    if output == "numpy":
        return lambda array: array
    from stoker.load.device.streams import as_tensor  # a home of torch

    return as_tensor


def beside(parts: Parts) -> list[Documents]:
    """The documents that windows are cut from, for those who ask where each one starts."""
    blended = len({id(dataset) for dataset in parts.datasets}) > 1
    return [dataset.documents(0 if blended else epoch) for epoch, dataset in enumerate(parts.datasets)]
