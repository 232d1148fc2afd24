"""Where samples lie: which bytes of which files hold samples `first` to `stop` of a dataset.

Three kinds of sample, one protocol: fixed windows of the token stream, documents, and the samples of
WebDataset tars. Windows need nothing but the manifest: sample n of a shard is tokens n*seq_len up to and
including (n+1)*seq_len, the last one being the label of the one before. The end of a shard that does not
fill a window is left out. Documents and tars have an index per shard, read when the shard is first used.
"""

from __future__ import annotations

import io
import threading
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from stoker.errors import UsageError
from stoker.formats import megatron, tar
from stoker.manifest import FileRecord, Manifest, ShardRecord
from stoker.mixing import Integers
from stoker.ordering.order import Draw
from stoker.reading.plain import PlainFile
from stoker.reading.reader import ShardReader


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of one file's plain bytes, and where it goes in the buffer of its chunk."""

    file: FileRecord
    shard: int
    start: int
    stop: int
    at: int


class Layout(Protocol):
    """Where samples lie; called from planning and reading threads."""

    shards: tuple[ShardRecord, ...]
    samples: int
    sample_bytes: float

    def shard_of(self, samples: Integers) -> Integers: ...
    def pieces(self, first: int, stop: int) -> list[Piece]: ...


def shards_of(manifest: Manifest, epoch: int) -> tuple[ShardRecord, ...]:
    """The shards of an epoch: a dataset may hold several epochs, each shuffled anew on disk."""
    return tuple(shard for shard in manifest.shards if shard.epoch == epoch % max(1, manifest.epochs))


class Windows:
    """Fixed windows of seq_len + 1 tokens, one token shared with the next."""

    def __init__(self, shards: tuple[ShardRecord, ...], *, dtype: np.dtype[Any], seq_len: int) -> None:
        if seq_len < 1:
            raise UsageError(f"seq_len={seq_len} is impossible", hint="use at least 1")
        self.dtype, self.seq_len = dtype, seq_len
        self.shards = shards
        counts = np.array([max(0, shard.tokens - 1) // seq_len for shard in shards], np.int64)
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._bounds: list[int] = self._starts.tolist()
        self.samples = self._bounds[-1]
        self.sample_bytes = float(seq_len * dtype.itemsize)

    def shard_of(self, samples: Integers) -> Integers:
        return np.searchsorted(self._starts, samples, side="right") - 1

    def token_in_shard(self, samples: Integers) -> Integers:
        """The first token of each sample, counted from the start of its shard."""
        starts: Integers = (samples - self._starts[self.shard_of(samples)]) * self.seq_len
        return starts

    def token_in_chunk(self, draw: Draw) -> Integers:
        """The first token of each sample in the buffer its chunk was read into. Pieces of different
        shards lie behind each other there, and each brings one token more than its samples' stride."""
        first = np.array([first for _, first, _ in draw.keys])[draw.chunk]
        places: Integers = (draw.sample - first) * self.seq_len + self.gaps_before(draw)
        return places

    def gaps_before(self, draw: Draw) -> Integers:
        """How many pieces of its chunk lie before each sample."""
        first = np.array([first for _, first, _ in draw.keys])
        gaps: Integers = self.shard_of(draw.sample) - self.shard_of(first)[draw.chunk]
        return gaps

    def pieces(self, first: int, stop: int) -> list[Piece]:
        low, high = (bisect_right(self._bounds, sample) - 1 for sample in (first, stop - 1))
        shards = (s for s in range(low, high + 1) if self._bounds[s] < self._bounds[s + 1])
        return [self._piece(shard, first, stop, shard - low) for shard in shards]

    def _piece(self, shard: int, first: int, stop: int, gaps: int) -> Piece:
        begin, end = self._bounds[shard], self._bounds[shard + 1]
        low, high = max(first, begin), min(stop, end)
        token = self.dtype.itemsize
        return Piece(
            file=self.shards[shard].files[0],
            shard=shard,
            start=(low - begin) * self.seq_len * token,
            stop=((high - begin) * self.seq_len + 1) * token,
            at=((low - first) * self.seq_len + gaps) * token,
        )

    def chunk_bytes(self, samples: int) -> int:
        """Room for a chunk of so many samples, wherever it begins."""
        empty = int((np.diff(self._starts) == 0).sum())
        gaps = min(samples, len(self.shards)) + empty + 1
        return (samples * self.seq_len + gaps) * self.dtype.itemsize


class _Indexed:
    """Samples found through an index per shard, loaded and verified when the shard is first used."""

    def __init__(self, shards: tuple[ShardRecord, ...], reader: ShardReader) -> None:
        self.shards, self._reader = shards, reader
        self.starts = np.concatenate([[0], np.cumsum([shard.samples for shard in shards])]).astype(np.int64)
        self.samples = int(self.starts[-1])
        data_bytes = sum(shard.files[0].bytes for shard in shards)
        self.sample_bytes = data_bytes / max(1, self.samples)
        self._indexes: dict[int, Any] = {}
        self._lock = threading.Lock()

    def shard_of(self, samples: Integers) -> Integers:
        return np.searchsorted(self.starts, samples, side="right") - 1

    def pieces(self, first: int, stop: int) -> list[Piece]:
        low, high = self.shard_of(np.array([first, stop - 1])).tolist()
        found: list[Piece] = []
        at = 0
        for shard in (s for s in range(low, high + 1) if self.starts[s] < self.starts[s + 1]):
            ends = np.array([max(first, self.starts[shard]), min(stop, self.starts[shard + 1]) - 1])
            (start, _), (_, end) = self.spans(shard, ends).tolist()
            found.append(Piece(file=self.shards[shard].files[0], shard=shard, start=start, stop=end, at=at))
            at += -(-(end - start) // 8) * 8  # so that tokens of any type stay aligned
        return found

    def spans(self, shard: int, samples: Integers) -> Integers:
        raise NotImplementedError

    def _index(self, shard: int) -> Any:  # what the format's own index is
        with self._lock:
            if shard not in self._indexes:
                record = self.shards[shard].files[1]
                file: Any = io.BytesIO(PlainFile(self._reader, record.name, record.bytes).readall())
                self._indexes[shard] = self._parse(file, record.name)
            return self._indexes[shard]

    def _parse(self, file: Any, name: str) -> Any:
        raise NotImplementedError


class Documents(_Indexed):
    """The documents of Megatron pairs."""

    def __init__(self, shards: tuple[ShardRecord, ...], reader: ShardReader, *, dtype: np.dtype[Any]) -> None:
        super().__init__(shards, reader)
        self.dtype = dtype

    def spans(self, shard: int, samples: Integers) -> Integers:
        """First and last byte of each document."""
        bounds = self._index(shard)
        inside = samples - self.starts[shard]
        return np.stack([bounds[inside], bounds[inside + 1]], axis=1)

    def lengths(self, samples: Integers) -> Integers:
        """Tokens in each document."""
        lengths = np.empty(len(samples), np.int64)
        shards = self.shard_of(samples)
        for shard in np.unique(shards).tolist():
            mine = shards == shard
            spans = self.spans(shard, samples[mine])
            lengths[mine] = (spans[:, 1] - spans[:, 0]) // self.dtype.itemsize
        return lengths

    def bounds(self, shard: int) -> Integers:
        """The byte each document of a shard starts at, and the end of the last."""
        bounds: Integers = self._index(shard)
        return bounds

    def _parse(self, file: Any, name: str) -> Integers:
        index = megatron.read_index(file, name=name)
        ends = np.append(index.offsets, index.bin_bytes)
        bounds: Integers = ends[index.documents]
        return bounds


class TarSamples(_Indexed):
    """The samples of WebDataset tars, found through the side index."""

    def spans(self, shard: int, samples: Integers) -> Integers:
        """First and last byte of each sample's members."""
        index = self._index(shard)
        inside = samples - self.starts[shard]
        last = index.starts[inside + 1] - 1
        return np.stack([index.offset[index.starts[inside]], index.offset[last] + index.size[last]], axis=1)

    def members(self, shard: int, sample: int) -> tuple[str, list[tuple[str, int, int]]]:
        """A sample's key, and the suffix, start and stop of each of its members."""
        index: tar.TarIndex = self._index(shard)
        number = sample - int(self.starts[shard])
        rows = range(int(index.starts[number]), int(index.starts[number + 1]))
        spans = [
            (
                index.suffixes[index.suffix[row]],
                int(index.offset[row]),
                int(index.offset[row] + index.size[row]),
            )
            for row in rows
        ]
        return index.keys[number].decode(errors="surrogateescape"), spans

    def _parse(self, file: Any, name: str) -> tar.TarIndex:
        return tar.read_index(file, name=name)
