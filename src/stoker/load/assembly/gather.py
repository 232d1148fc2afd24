"""Gather kernel: rows of tokens out of the memory that holds chunks; in C where it was built, else numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from stoker.mixing import Integers
from stoker.native import native

Array = npt.NDArray[Any]


class Gathering:
    """The rows of tokens that begin at `places`, in a type to be gathered in. Keeps both alive."""

    def __init__(self, tokens: Array, places: Integers, dtype: np.dtype[Any]) -> None:
        self._tokens, self._places = tokens, np.ascontiguousarray(places, np.int64)
        self._way = _way(tokens.dtype, dtype)
        self._tokens_at, self._places_at = tokens.ctypes.data, self._places.ctypes.data

    def put(self, into: Array, *, first: int = 0) -> None:
        """Fill `into`, [rows, tokens] without gaps, with the rows from `first` on."""
        rows, length = into.shape
        if self._way is None:
            into[:] = rows_of(self._tokens, length)[self._places[first : first + rows]]
            return
        places = self._places_at + first * self._places.itemsize
        native("load._gather").gather(
            self._way, self._tokens_at, len(self._tokens), places, rows, length, into.ctypes.data
        )


def rows_of(tokens: Array, length: int) -> Array:
    """Every stretch of `length` tokens, as rows of a view: row i starts at token i."""
    step = tokens.dtype.itemsize
    return as_strided(tokens, (len(tokens) - length + 1, length), (step, step), writeable=False)


@cache
def _way(narrow: np.dtype[Any], wide: np.dtype[Any]) -> int | None:
    """How the extension turns one type into the other; None where it cannot."""
    module = native("load._gather") if narrow.isnative and wide.isnative else None
    way: int | None = module.way(narrow.name, wide.name) if module else None
    return way
