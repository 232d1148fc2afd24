"""Sample index: which bytes of which files hold samples `first` to `stop` of a dataset.

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

from stoker.errors import BadShardError, UsageError
from stoker.formats import megatron, tar
from stoker.load.ordering.draw import Draw
from stoker.load.reading.plain import PlainFile
from stoker.load.reading.reader import ShardReader
from stoker.manifest import FileRecord, Manifest, ShardRecord
from stoker.mixing import Integers


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A stretch of one file's plain bytes, and where it goes in the buffer of its chunk."""

    file: FileRecord
    shard: int
    start: int
    stop: int
    at: int
    lost: bool = False  # nothing says what is in it, and it is not to be read


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

    def windows_of(self, shard: int) -> tuple[int, int]:
        """The samples `first:stop` of a shard."""
        return self._bounds[shard], self._bounds[shard + 1]

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
        self._lost: set[int] = set()  # shards whose index cannot be used, where damage is to be skipped
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
            file, lost = self.shards[shard].files[0], shard in self._lost
            found.append(Piece(file=file, shard=shard, start=start, stop=end, at=at, lost=lost))
            at += -(-(end - start) // 8) * 8  # so that tokens of any type stay aligned
        return found

    def spans(self, shard: int, samples: Integers) -> Integers:
        raise NotImplementedError

    def _index(self, shard: int) -> Any:  # what the format's own index is
        with self._lock:
            if shard not in self._indexes:
                self._indexes[shard] = self._read_index(shard)
            return self._indexes[shard]

    def _read_index(self, shard: int) -> Any:
        record = self.shards[shard].files[1]
        try:
            file: Any = io.BytesIO(PlainFile(self._reader, record.name, record.bytes).readall())
            return self._parse(file, self.shards[shard])
        except BadShardError as error:
            if not self._reader.skips:
                raise
            self._lost.add(shard)
            self._reader.damage.named.append(
                f"{error.message}: the {self.shards[shard].samples:,} samples that it finds are left out"
            )
            return self._stand_in(self.shards[shard].samples)

    def _parse(self, file: Any, shard: ShardRecord) -> Any:
        """The index; it must say of the shard what the manifest says."""
        raise NotImplementedError

    def _stand_in(self, samples: int) -> Any:
        """For an index that cannot be used: so many samples, somewhere."""
        raise NotImplementedError


def _disagrees(name: str, found: str, wanted: str) -> BadShardError:
    return BadShardError(
        f"{name} describes {found}, its manifest says {wanted}",
        hint="restore both from one copy, or run `stoker prepare index` after deleting the manifest",
    )


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
        spans = self.spans_of(self.shard_of(samples), samples)
        lengths: Integers = (spans[:, 1] - spans[:, 0]) // self.dtype.itemsize
        return lengths

    def spans_of(self, shards: Integers, samples: Integers) -> Integers:
        """First and last byte of documents in whichever shards."""
        spans = np.empty((len(samples), 2), np.int64)
        by_shard = np.argsort(shards, kind="stable")
        edges = np.flatnonzero(np.diff(shards[by_shard], prepend=-1, append=-1))
        for low, high in zip(edges.tolist(), edges[1:].tolist(), strict=False):
            mine = by_shard[low:high]
            spans[mine] = self.spans(int(shards[mine[0]]), samples[mine])
        return spans

    def bounds(self, shard: int) -> Integers:
        """The byte each document of a shard starts at, and the end of the last."""
        bounds: Integers = self._index(shard)
        if shard in self._lost:
            raise BadShardError(
                f"{self.shards[shard].files[1].name} cannot be used, and where documents begin is asked for",
                hint="stage or copy it again, or load with documents=False",
            )
        return bounds

    def _parse(self, file: Any, shard: ShardRecord) -> Integers:
        name = shard.files[1].name
        index = megatron.read_index(file, name=name)
        found = (len(index.documents) - 1, index.tokens, index.dtype.name)
        if found != (wanted := (shard.samples, shard.tokens, self.dtype.name)):
            raise _disagrees(
                name, *("{:,} documents of {:,} tokens, {}".format(*one) for one in (found, wanted))
            )
        ends = np.append(index.offsets, index.bin_bytes)
        bounds: Integers = ends[index.documents]
        return bounds

    def _stand_in(self, samples: int) -> Integers:
        return np.arange(samples + 1, dtype=np.int64) * self.dtype.itemsize


class TarSamples(_Indexed):
    """The samples of WebDataset tars, found through the side index."""

    def spans(self, shard: int, samples: Integers) -> Integers:
        """First and last byte of each sample's members, with the header of the first."""
        index = self._index(shard)
        inside = samples - self.starts[shard]
        last = index.starts[inside + 1] - 1
        first = index.offset[index.starts[inside]] - tar.BLOCK
        return np.stack([first, index.offset[last] + index.size[last]], axis=1)

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

    def _parse(self, file: Any, shard: ShardRecord) -> tar.TarIndex:
        data, side = shard.files
        tar_bytes = None if data.name.endswith(".zst") else data.bytes
        index = tar.read_index(file, name=side.name, tar_bytes=tar_bytes)
        if len(index) != shard.samples:
            raise _disagrees(side.name, f"{len(index):,} samples", f"{shard.samples:,}")
        return index

    def _stand_in(self, samples: int) -> tar.TarIndex:
        numbers = np.arange(samples + 1, dtype=np.int64)
        return tar.TarIndex(
            keys=np.full(samples, b"lost"),
            starts=numbers,
            suffixes=("lost",),
            suffix=np.zeros(samples, np.uint16),
            offset=tar.BLOCK * (2 * numbers[:-1] + 1),
            size=np.ones(samples, np.int64),
        )
