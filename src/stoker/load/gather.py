"""Rows of tokens out of the memory that holds chunks: in C where the extension was built, else with numpy."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from stoker.mixing import Integers
from stoker.native import native

Array = npt.NDArray[Any]


def gather(tokens: Array, places: Integers, *, into: Array) -> None:
    """Row i of `into` becomes the tokens from places[i] on, in the type of `into`."""
    way = _way(tokens.dtype, into.dtype) if into.flags.c_contiguous else None
    if way is None:
        into[:] = rows_of(tokens, into.shape[1])[places]
        return
    places = np.ascontiguousarray(places, np.int64)
    native("load._gather").gather(
        way, tokens.ctypes.data, len(tokens), places.ctypes.data, len(places), into.shape[1], into.ctypes.data
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
