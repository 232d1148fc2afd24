"""Rows of tokens out of the memory that holds chunks: in C where the extension was built, else with numpy."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from stoker.mixing import Integers

Array = npt.NDArray[Any]


def gather(tokens: Array, places: Integers, *, into: Array) -> None:
    """Row i of `into` becomes the tokens from places[i] on, in the type of `into`."""
    way = _way(tokens.dtype, into.dtype) if into.flags.c_contiguous else None
    if way is None:
        into[:] = rows_of(tokens, into.shape[1])[places]
        return
    places = np.ascontiguousarray(places, np.int64)
    _native().gather(
        way, tokens.ctypes.data, len(tokens), places.ctypes.data, len(places), into.shape[1], into.ctypes.data
    )


def rows_of(tokens: Array, length: int) -> Array:
    """Every stretch of `length` tokens, as rows of a view: row i starts at token i."""
    step = tokens.dtype.itemsize
    return as_strided(tokens, (len(tokens) - length + 1, length), (step, step), writeable=False)


@cache
def _native() -> Any:  # a C module without stubs
    try:
        return import_module("stoker.load._gather")
    except ImportError:  # installed without a C compiler
        return None


@cache
def _way(narrow: np.dtype[Any], wide: np.dtype[Any]) -> int | None:
    """How the extension turns one type into the other; None where it cannot."""
    way: int | None = (
        _native().way(narrow.name, wide.name) if _native() and _is_native(narrow, wide) else None
    )
    return way


def _is_native(*dtypes: np.dtype[Any]) -> bool:
    return all(dtype.isnative for dtype in dtypes)
