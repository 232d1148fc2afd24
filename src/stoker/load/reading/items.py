"""Map-style datasets: a torch Dataset, a Hugging Face one, an array; anything with `__len__`, `__getitem__`.

Samples are asked for by their number, in the computed order; nothing is read in chunks, nothing verified.
Where whole batches can be had at once (rows of an array, columns of an Arrow table) no sample is a Python
object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_64_hexdigest

from stoker.errors import UsageError
from stoker.formats.megatron import read_dtype
from stoker.load.reading.foreign import samples_in
from stoker.load.reading.layout import Piece
from stoker.load.reading.reader import Damage
from stoker.load.reading.sources import check_items, is_array
from stoker.manifest import ShardRecord
from stoker.mixing import Integers

# What a sample takes that is known only once it was made: so much that batches are made one by one.
_UNKNOWN_BYTES = 1 << 20
_TOLD_BY = 8  # rows, from the first to the last: they tell a dataset from others of its shape


class Items(Protocol):
    """Numbered samples. Called from the thread that assembles; in worker processes, from theirs."""

    samples: int
    sample_bytes: float

    @property
    def fingerprint(self) -> str: ...
    def some(self, numbers: list[int]) -> Sequence[Any]: ...
    def batch(self, numbers: Integers) -> Any:
        """All of them at once, or None where that cannot be."""

    def check_rows(self, seq_len: int) -> None:
        """Refuse rows that are known to be of another length."""


class MapItems:
    """A dataset of somebody's own class."""

    def __init__(self, dataset: Any) -> None:  # has __len__ and __getitem__
        self._dataset, self._kind = dataset, type(dataset).__qualname__
        # asked once: an order is of so many samples, whatever a dataset that grows says later
        self.samples, self.sample_bytes = samples_in(dataset), float(_UNKNOWN_BYTES)

    @property
    def fingerprint(self) -> str:
        return f"{self._kind}:{self.samples}"

    def some(self, numbers: list[int]) -> Sequence[Any]:
        if hasattr(self._dataset, "__getitems__"):
            found: Sequence[Any] = self._dataset.__getitems__(numbers)
            return found
        return [self._one(number) for number in numbers]

    def batch(self, numbers: Integers) -> Any:
        return None

    def check_rows(self, seq_len: int) -> None:
        """How long the samples of somebody's own class are is seen when they are made."""

    def _one(self, number: int) -> Any:
        try:
            return self._dataset[number]
        except Exception as error:
            if hasattr(error, "add_note"):
                error.add_note(f"in sample {number} of {self._kind}")
            raise


class ArrayItems:
    """The rows of an array or a tensor."""

    def __init__(self, array: Any) -> None:  # numpy's or torch's
        self._array = array
        self.samples = len(array)
        self.sample_bytes = float(max(1, array.itemsize * int(np.prod(array.shape[1:]))))

    @cached_property
    def fingerprint(self) -> str:
        rows = b"" if getattr(self._array.dtype, "hasobject", False) else _bytes_of(self._array)
        return _told(f"array:{tuple(self._array.shape)}:{self._array.dtype}", rows)

    def some(self, numbers: list[int]) -> Sequence[Any]:
        return list(self._array[numbers])

    def batch(self, numbers: Integers) -> Any:
        return self._array[numbers]

    def check_rows(self, seq_len: int) -> None:
        if self._array.ndim == 2 and self._array.shape[1] not in (seq_len, seq_len + 1):
            raise UsageError(
                f"an array of rows of {self._array.shape[1]:,} is not cut into rows of seq_len={seq_len:,}",
                hint="give one row of ids, array.reshape(-1), or leave seq_len out for its rows as they are",
            )


class TokenItems(ArrayItems):
    """Windows of seq_len + 1 tokens of an array of ids, one token shared with the next."""

    def __init__(self, ids: Any, *, seq_len: int, dtype: Any, labels: str) -> None:
        ids = np.asarray(ids)
        if len(ids) <= seq_len:
            raise UsageError(
                f"an array of {len(ids):,} tokens has no window of {seq_len + 1:,}",
                hint="use a shorter seq_len",
            )
        if ids.dtype.kind not in "iu":
            raise UsageError(
                f"an array of {ids.dtype.name} holds no token ids",
                hint="give whole numbers, or leave seq_len out",
            )
        super().__init__(np.lib.stride_tricks.sliding_window_view(ids, seq_len + 1)[::seq_len])
        self._dtype, self._labels = np.dtype(dtype or ids.dtype.newbyteorder("=")), labels
        self._fits = np.can_cast(ids.dtype, self._dtype)
        self.seq_len, self._token_bytes = seq_len, ids.itemsize

    def span(self, number: int) -> tuple[int, int]:
        """The bytes of a window's inputs."""
        first = number * self.seq_len * self._token_bytes
        return first, first + self.seq_len * self._token_bytes

    def some(self, numbers: list[int]) -> Sequence[Any]:
        columns = self.batch(np.array(numbers, np.int64))
        return [{name: rows[row] for name, rows in columns.items()} for row in range(len(numbers))]

    def batch(self, numbers: Integers) -> Any:
        tokens = self._array[numbers]
        if not self._fits:
            self._check(tokens)
        tokens = tokens.astype(self._dtype, copy=False)
        found = {"input_ids": tokens[:, :-1]}
        if self._labels:
            found["labels"] = tokens[:, 1:] if self._labels == "next" else tokens[:, :-1]
        return found

    def _check(self, tokens: Any) -> None:
        """A type that cannot hold an id would give another one, without a word."""
        if not (tokens.astype(self._dtype) == tokens).all():
            raise UsageError(
                f"dtype={self._dtype.name} does not hold the ids {tokens.min():,} to {tokens.max():,}",
                hint="use dtype=None for as they are on disk, or a wider one",
            )


class ArrowItems(MapItems):
    """A Hugging Face dataset: columns go from its Arrow table into batches as they are, or as the format that
    was set makes them."""

    def __init__(self, dataset: Any) -> None:  # datasets.Dataset
        super().__init__(dataset)
        shown = dataset.format
        # what has to be decoded, or goes through the dataset's own transform, is asked for sample by sample
        plain = shown["type"] in (None, "arrow") and all(map(_is_plain, dataset.features.values()))
        self._table = dataset.with_format("arrow", columns=shown["columns"]) if plain else None
        self._is_formatted = shown["type"] in ("numpy", "torch")
        if plain:
            self.sample_bytes = max(1.0, dataset.data.nbytes / max(1, len(dataset.data)))

    @cached_property
    def fingerprint(self) -> str:
        shown = self._dataset.with_format("arrow", columns=self._dataset.format["columns"])
        rows = repr(shown[_places(self.samples)].to_pylist()).encode()
        return _told(f"{self._kind}:{self.samples}:{','.join(self._dataset.column_names)}", rows)

    def batch(self, numbers: Integers) -> Any:
        if self._is_formatted:
            return self._dataset[numbers.tolist()]
        if self._table is None:
            return None
        found = self._table[numbers.tolist()]
        return {name: _column(found.column(name)) for name in found.column_names}


def _places(samples: int) -> list[int]:
    return sorted({number * (samples - 1) // (_TOLD_BY - 1) for number in range(_TOLD_BY)})


def _bytes_of(array: Any) -> bytes:  # numpy's or torch's
    """Some rows, as they lie in memory."""
    some = array[_places(len(array))]
    if hasattr(some, "detach"):  # numpy has not all of torch's types
        some = some.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return np.ascontiguousarray(some).tobytes()


def _told(shape: str, rows: bytes) -> str:
    """What others of this shape share, and what they do not."""
    return f"{shape}#{xxh3_64_hexdigest(rows)}"


def _is_plain(feature: Any) -> bool:
    """Whether a column of this feature is what is stored: numbers, text, and lists of them."""
    if isinstance(feature, dict):
        return all(map(_is_plain, feature.values()))
    kind = type(feature).__name__
    if kind in ("Sequence", "List", "LargeList"):
        return _is_plain(feature.feature)
    return kind in ("Value", "ClassLabel")


def _column(column: Any) -> Any:  # pyarrow's
    """An array where all values are numbers, or lists of as many numbers each; else a list of Python's."""
    values = column.combine_chunks()
    lists = hasattr(values.type, "value_type")
    flat = values.flatten() if lists else values
    if values.null_count or flat.null_count or flat.type.num_fields or not _is_number(flat.type):
        return values.to_pylist()
    width, left = divmod(len(flat), max(1, len(values)))
    if lists and (left or any(len(one) != width for one in values)):
        return values.to_pylist()
    array = flat.to_numpy(zero_copy_only=False)
    if not array.flags.writeable:  # the dataset's own memory, or its file: a batch may be written to
        array = array.copy()
    return array.reshape(len(values), width) if lists else array


def _is_number(kind: Any) -> bool:
    name = str(kind)
    return name in ("bool", "float", "double", "halffloat") or name.startswith(("int", "uint"))


class ItemsLayout:
    """Items, where a layout of shards is asked for: it has none."""

    def __init__(self, items: Items) -> None:
        self.items, self.shards = items, tuple[ShardRecord, ...]()
        self.samples, self.sample_bytes = items.samples, items.sample_bytes

    def shard_of(self, samples: Integers) -> Integers:
        return np.zeros_like(samples)

    def pieces(self, first: int, stop: int) -> list[Piece]:
        return []


class _NoReader:
    """Items read themselves."""

    def __init__(self) -> None:
        self.damage = Damage()

    def close(self) -> None:
        """Nothing was opened."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemsDataset:
    """Items, opened."""

    items: Items
    name: str
    ids: Any = None  # an array of one dimension: the windows of seq_len tokens in it, if those are asked for
    is_raw: bool = False  # a file of token ids and nothing else
    reader: _NoReader = field(default_factory=_NoReader)
    is_tokens = False
    epochs = 1

    @property
    def has_ids(self) -> bool:
        """Whether this may be one row of token ids, to be cut into windows."""
        return self.ids is not None

    def layout(self, *, seq_len: int, dtype: Any, labels: str) -> ItemsLayout:
        if self.ids is None or not (seq_len or self.is_raw):
            if seq_len:
                self.items.check_rows(seq_len)
            return ItemsLayout(self.items)
        if not seq_len:
            raise UsageError("token data needs seq_len", hint="pass seq_len=2048, or what your model takes")
        return ItemsLayout(TokenItems(self.ids, seq_len=seq_len, dtype=dtype, labels=labels))

    def fingerprint(self) -> str:
        return self.items.fingerprint


def open_items(source: Any) -> ItemsDataset:
    """An array, or what has __len__ and __getitem__."""
    check_items(source)
    name = type(source).__qualname__
    if is_array(source):
        return ItemsDataset(items=ArrayItems(source), name=name, ids=source if source.ndim == 1 else None)
    if type(source).__module__.startswith("datasets.") and hasattr(source, "with_format"):
        return ItemsDataset(items=ArrowItems(source), name=name)
    return ItemsDataset(items=MapItems(source), name=name)


def open_raw(path: Path, *, dtype: Any) -> ItemsDataset:
    """The ids in a file that holds nothing else, as nanoGPT's train.bin."""
    ids = raw_tokens(path, dtype=dtype)
    return ItemsDataset(items=ArrayItems(ids), name=str(path), ids=ids, is_raw=True)


def raw_tokens(path: Path, *, dtype: Any) -> np.ndarray[Any, np.dtype[Any]]:
    """Mapped, not read."""
    kind, size = _ids_type(dtype), path.stat().st_size
    if kind.kind not in "iu" or size % kind.itemsize or not size:
        raise UsageError(f"{path} is {size:,} bytes, which are no ids of type {kind.name}", hint=_BIN_DTYPES)
    if (index := path.with_suffix(".idx")).is_file() and read_dtype(index) != kind.name:
        raise UsageError(
            f"{path} has an index that says its ids are {read_dtype(index)}, not {kind.name}",
            hint=f"give bin_dtype={read_dtype(index)!r}, or the folder, adopted by `stoker prepare index`",
        )
    return np.memmap(path, dtype=kind, mode="r")


_BIN_DTYPES = "say what it was written with: bin_dtype='uint16', 'uint32' or 'int32'"


def _ids_type(dtype: Any) -> np.dtype[Any]:
    try:
        found: np.dtype[Any] = np.dtype(dtype)
    except TypeError as error:
        raise UsageError(f"bin_dtype={dtype!r} is none that numpy knows", hint=_BIN_DTYPES) from error
    return found
