"""`Engine`: what makes groups of batches, and what it works with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stoker.load.assembly.batch import Assembler
from stoker.load.assembly.rows import Batch
from stoker.load.assembly.transform import Transforms
from stoker.load.media.choose import NO_MEDIA, Media
from stoker.load.media.members import Members
from stoker.load.options import LoaderOptions
from stoker.load.ordering.draw import Draw, Key
from stoker.load.parts import Parts
from stoker.load.prefetch.pipeline import Maker
from stoker.load.reading.chunks import Chunks
from stoker.load.reading.cufile import Opened, open_cufile
from stoker.load.reading.dataset import Dataset
from stoker.load.store import Store


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


def closer(store: Store | None, transforms: Transforms | Members | None) -> Callable[[], None]:
    def close() -> None:
        if transforms:
            transforms.close()
        if store:
            store.close()

    return close


def asked_in(parts: Parts) -> Callable[[Draw], Sequence[Key]]:
    """The order in which chunks are asked for. A cache that cannot hold all files lets go of them by when
    they come next (`needs`): what it was told must be what is read. Elsewhere that need not be found out."""
    datasets = (one for one in parts.datasets if isinstance(one, Dataset))
    if any(one.reader.is_short_of_room for one in datasets):
        return Draw.keys_by_turn
    return lambda draw: draw.keys


def is_coming(parts: Parts) -> bool:
    return any(one.reader.is_coming for one in parts.datasets if isinstance(one, Dataset))


def cufile_of(options: LoaderOptions, is_cuda: bool) -> Opened:
    if options.reader != "cufile":
        reader = "pread" if options.device and options.reader == "mmap" else options.reader
        return Opened(cufile=None, reason=reader)
    if not is_cuda:
        return Opened(cufile=None, reason="cufile needs a CUDA device: reading with pread")
    return open_cufile()
