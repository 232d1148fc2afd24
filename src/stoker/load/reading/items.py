"""Map-style datasets: a torch Dataset, a Hugging Face one, an array; anything with `__len__`, `__getitem__`.

Samples are asked for by their number, in the computed order; nothing is read in chunks, nothing verified.
Where whole batches can be had at once (rows of an array, columns of an Arrow table) no sample is a Python
object.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stoker.errors import UsageError
from stoker.formats.megatron import read_dtype
from stoker.load.reading.layout import Piece
from stoker.load.reading.reader import Damage
from stoker.manifest import ShardRecord
from stoker.mixing import Integers

# What a sample takes that is known only once it was made: so much that batches are made one by one.
_UNKNOWN_BYTES = 1 << 20


class Items(Protocol):
    """Numbered samples. Called from the thread that assembles; in worker processes, from theirs."""

    samples: int
    sample_bytes: float

    @property
    def fingerprint(self) -> str: ...
    def some(self, numbers: list[int]) -> Sequence[Any]: ...
    def batch(self, numbers: Integers) -> Any:
        """All of them at once, or None where that cannot be."""


class MapItems:
    """A dataset of somebody's own class."""

    def __init__(self, dataset: Any) -> None:  # has __len__ and __getitem__
        self._dataset, self._kind = dataset, type(dataset).__qualname__
        # asked once: an order is of so many samples, whatever a dataset that grows says later
        self.samples, self.sample_bytes = len(dataset), float(_UNKNOWN_BYTES)

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

    @property
    def fingerprint(self) -> str:
        return f"array:{tuple(self._array.shape)}:{self._array.dtype}"

    def some(self, numbers: list[int]) -> Sequence[Any]:
        return list(self._array[numbers])

    def batch(self, numbers: Integers) -> Any:
        return self._array[numbers]


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

    @property
    def fingerprint(self) -> str:
        return f"{self._kind}:{self.samples}:{','.join(self._dataset.column_names)}"

    def batch(self, numbers: Integers) -> Any:
        if self._is_formatted:
            return self._dataset[numbers.tolist()]
        if self._table is None:
            return None
        found = self._table[numbers.tolist()]
        return {name: _column(found.column(name)) for name in found.column_names}


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

    def layout(self, *, seq_len: int, dtype: Any, labels: str) -> ItemsLayout:
        if self.ids is None or not (seq_len or self.is_raw):
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


def is_array(source: Any) -> bool:
    """numpy's or torch's, by what it has: neither is imported to ask."""
    return all(hasattr(source, name) for name in ("shape", "dtype", "ndim", "itemsize", "__getitem__"))


def check_items(source: Any) -> None:
    """Refuse what is no dataset, and say what is missing."""
    kind = "None" if source is None else f"a {type(source).__qualname__}"
    if isinstance(source, (dict, set, bytes, bytearray, int, float)) or source is None:
        raise UsageError(f"{kind} is no dataset", hint=_WHAT)
    if is_array(source) and hasattr(source, "filled"):  # numpy.ma is slow to import
        raise UsageError("a masked array would lose its mask", hint="give source.filled(...), or columns")
    if missing := [name for name in ("__len__", "__getitem__") if not _has(source, name)]:
        stream = " and can only be read from its beginning" if hasattr(source, "__iter__") else ""
        raise UsageError(
            f"{kind} has no {' and no '.join(missing)}{stream}: its samples have no computed order",
            hint=_WHAT,
        )
    try:
        samples = len(source)
    except TypeError as error:
        raise UsageError(f"{kind} does not know its length: {error}", hint=_WHAT) from error
    if not samples:
        raise UsageError(f"{kind} holds no samples", hint="give one that does")


def _has(source: Any, name: str) -> bool:
    """Torch's own Dataset has a `__getitem__` that only says that there is none."""
    torch: Any = sys.modules.get("torch.utils.data")
    inherited = getattr(torch.Dataset, name, None) if torch else None
    return hasattr(source, name) and getattr(type(source), name, True) is not inherited


_WHAT = (
    "give the folder of a prepared dataset, a raw .bin of tokens, an array, a Hugging Face dataset, or what "
    "has __len__ and __getitem__; several in a list are blended. `stoker prepare` takes anything else"
)


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
