"""Batch views: rows of a buffer, cut apart when they are asked for, or gathered only then.

A buffer holds the rows of several batches, and is used again only when nobody holds a view of it any more, so
batches may be kept.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import UsageError

Array = npt.NDArray[Any]
Batch = dict[str, Any]  # name → array; or what a user's transform and collate make

_SPARED = 64  # takes in a row that left buffers over, before those are given back


class Buffers:
    """Arrays that are handed out again when nobody holds them any more."""

    def __init__(self) -> None:
        self._arrays: list[Array] = []
        self._free_each_time: list[int] = []  # in takes in a row that one buffer less would have done for

    def __len__(self) -> int:
        return len(self._arrays)

    def take(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        free = self._free()
        self._free_each_time = [*self._free_each_time, len(free)] if len(free) > 1 else []
        if len(self._free_each_time) > _SPARED:
            for _ in range(min(self._free_each_time) - 1):
                del self._arrays[free.pop()]
            self._free_each_time = []
        if free:
            array = self._arrays[free[0]]
            if array.dtype == dtype and array.shape[1:] == shape[1:] and len(array) >= shape[0]:
                return array[: shape[0]]
            del self._arrays[free[0]]  # of another group size: it is not coming back
        array = np.empty(shape, dtype)
        self._arrays.append(array)
        return array

    def _free(self) -> list[int]:
        # two references: the list's, and that of the call itself. Every view of an array counts.
        return [n for n in range(len(self._arrays)) if sys.getrefcount(self._arrays[n]) == 2]


class Rows(Sequence[Batch]):
    """Columns of rows as batches, cut apart when one is asked for: by the thread that trains, while the next
    group is being gathered."""

    def __init__(self, columns: dict[str, Any], size: int) -> None:
        self.columns, self._size = columns, size
        self._cut: list[
            Batch
        ] = []  # once a part of them was asked for: a loop may be left and taken up again

    def __len__(self) -> int:
        return -(-len(next(iter(self.columns.values()))) // self._size)

    def __iter__(self) -> Iterator[Batch]:
        names = tuple(self.columns)
        rows = zip(*(split(column, self._size) for column in self.columns.values()), strict=True)
        if len(names) == 2:  # the usual ids and labels: a third of the time of the line below
            one, other = names
            return ({one: first, other: second} for first, second in rows)
        return (dict(zip(names, values, strict=True)) for values in rows)

    def __getitem__(self, number: Any) -> Any:
        self._cut = self._cut or list(self)
        return self._cut[number]


def check_process(pid: int) -> None:
    """What was made in one process is of no use to a forked one."""
    if os.getpid() != pid:
        raise UsageError(
            "this loader was started before the process was forked; its threads stayed with the parent",
            hint="make the loader in the child, or start processes with spawn",
        )


class Later(Sequence[Batch]):
    """Batches that are gathered some at a time, when they are asked for: they are used while the processor
    still has them in its cache."""

    def __init__(self, batches: int, make: Callable[[range], Rows], *, at_once: int) -> None:
        self._batches, self._make, self._at_once = batches, make, at_once
        self._first, self._pid = 0, os.getpid()

    def __len__(self) -> int:
        return self._batches - self._first

    def __iter__(self) -> Iterator[Batch]:
        for start in range(self._first, self._batches, self._at_once):
            check_process(self._pid)  # a child does not have the chunks
            yield from self._make(range(start, min(start + self._at_once, self._batches)))

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice) and number.stop is None and number.step is None and number.start >= 0:
            rest = copy(self)
            rest._first += number.start
            return rest
        return list(self)[number]


def split(values: Any, size: int) -> Sequence[Any]:
    """An array or a tensor in stretches of rows. A tensor's own split takes a third of the time of slicing it
    in Python, and a quarter less if told every size, which at tens of thousands of batches a second is what
    counts."""
    rows = len(values)
    if isinstance(values, np.ndarray):
        return [values[start : start + size] for start in range(0, rows, size)]
    sizes = [size] * (rows // size) + [rows % size] * (rows % size > 0)
    parts: Sequence[Any] = values.unsafe_split_with_sizes(sizes)  # what is unsafe are gradients
    return parts
