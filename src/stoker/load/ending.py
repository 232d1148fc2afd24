"""What a loader hands over to finalizers and threads: functions that know nothing of the loader, which would
live as long as they do."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from stoker.errors import require
from stoker.load.assembly.rows import Batch
from stoker.load.engine import Engine
from stoker.load.options import LoaderOptions
from stoker.load.parts import AnyDataset
from stoker.load.prefetch.pipeline import Group, Readers


class Pipeline(Protocol):
    """Hands over groups; the consumer calls both from one thread."""

    @property
    def is_behind(self) -> bool: ...
    def next(self) -> Group: ...
    def close(self) -> None: ...


def resizer(readers: Readers, engine: Engine) -> Callable[[int], None]:
    """Knows nothing of the loader, which would live as long as its thread."""

    def resize(threads: int) -> None:
        readers.resize(threads)
        engine.read_with(threads)

    return resize


def finisher(output: str) -> Callable[[Batch], Batch]:
    if output == "numpy":
        return lambda batch: batch
    require("torch", extra="torch", otherwise="output='numpy'")
    from stoker.load.device.streams import as_tensors  # the one home of torch

    return as_tensors


def last_touch(
    part: Callable[[Batch], Batch] | None, options: LoaderOptions, *, are_numbers: bool
) -> Callable[[Batch], Any] | None:
    """What is left to the loop's thread: a rank's part, or pixels as they were asked for."""
    return presenter(options, are_numbers=are_numbers) if part is None and options.pixels else part


def presenter(options: LoaderOptions, *, are_numbers: bool = False) -> Callable[[Any], Any]:
    """Makes of decoded bytes what was asked for; `are_numbers`: a card has made most of it."""
    if options.output == "numpy":
        from stoker.load.media.floats import as_asked as in_numpy

        return partial(in_numpy, columns=options.pixels)
    from stoker.load.device.pixels import as_asked  # a home of torch

    return partial(as_asked, columns=options.pixels, are_numbers=are_numbers)


def close_here(pipeline: Pipeline, pid: int) -> None:
    """Not in a forked child: a lock may have been held in the parent, whose threads and workers they are."""
    if os.getpid() == pid:
        pipeline.close()


def close_parts(readers: Readers, datasets: Sequence[AnyDataset], close_engine: Callable[[], None]) -> None:
    readers.shutdown()
    close_engine()
    for dataset in datasets:
        with suppress(OSError):
            dataset.reader.close()
