"""Block digests: what the blocks of a large file's slices must hash to.

They are worth as much as the digest of the whole file, since the manifest vouches for both, and cost less:
a slice is hashed by whoever received it, while it is in the processor's cache; slices need not come in order;
and one that is wrong is known at once and fetched again alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stoker.stage.landing.digest import BlockDigests, is_sound
from stoker.stage.landing.maps import SLICE_BYTES
from stoker.stage.origins.origin import Collection
from stoker.stage.plan import BLOCKS, FIRST

_DIGEST_BYTES = 8
_LEAST_BYTES = 64 << 10  # below this Python takes longer than the hash


def has_blocks(collection: Collection) -> bool:
    """Whether the digests are there, and of blocks that our slices are made of."""
    size = collection.block_bytes
    are_parts = size >= _LEAST_BYTES and SLICE_BYTES % size == 0
    return are_parts and any(file.name == BLOCKS for file in collection.files)


class Blocks:
    """The digests as they lie in a file; `of` gives those of some files, none if the file is damaged."""

    def __init__(self, collection: Collection, path: Path) -> None:
        self._spans, self._block_bytes = _spans(collection), collection.block_bytes
        (own,) = (file for file in collection.files if file.name == BLOCKS)
        self._data = path.read_bytes() if is_sound(path, own.digest) else b""

    def of(self, names: Sequence[str]) -> tuple[BlockDigests, ...]:
        spans = [self._spans[name] for name in names] if self._data else ()
        return tuple(
            BlockDigests(data=self._data[start:stop], block_bytes=self._block_bytes) for start, stop in spans
        )


def _spans(collection: Collection) -> dict[str, tuple[int, int]]:
    """Where each file's digests lie: in the manifest's order, as the collection has it too."""
    spans, start = {}, 0
    for file in collection.files:
        if file.name not in FIRST:
            stop = start - -file.bytes // collection.block_bytes * _DIGEST_BYTES
            spans[file.name] = (start, stop)
            start = stop
    return spans
