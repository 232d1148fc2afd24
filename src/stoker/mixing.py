"""Hash-based randomness: keys from numbers, and permutations from keys; computed, not drawn.

Every function here is pure and the same on every machine and with every version of numpy, so that an
order can be computed again from its seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]
Keys = npt.NDArray[np.uint64]

_WORD = 0xFFFFFFFFFFFFFFFF
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def key_of(*parts: int) -> int:
    """One well-mixed 64-bit key from several numbers."""
    key = _GOLDEN
    for part in parts:
        key = ((key ^ (part & _WORD)) + _GOLDEN) & _WORD
        key = ((key ^ (key >> 30)) * _FIRST) & _WORD
        key = ((key ^ (key >> 27)) * _SECOND) & _WORD
        key ^= key >> 31
    return key


def mixed(values: Keys) -> Keys:
    """splitmix64 of each value: a bijection in which every input bit moves every output bit."""
    keys: Keys = values + np.uint64(_GOLDEN)
    high = keys >> np.uint64(30)
    keys ^= high
    keys *= np.uint64(_FIRST)
    keys ^= np.right_shift(keys, np.uint64(27), out=high)
    keys *= np.uint64(_SECOND)
    keys ^= np.right_shift(keys, np.uint64(31), out=high)
    return keys


def permutations(size: int, keys: Sequence[int] | Keys) -> Integers:
    """For each key, all numbers below `size` in a random order, as rows: sorted by a key each, which
    carries the number in its low bits. (numpy's own may change between its versions.)"""
    low = (1 << max(0, size - 1).bit_length()) - 1
    numbers, spread = _counted(size)
    sorting = mixed(spread + np.array(keys, np.uint64)[:, None])
    sorting &= np.uint64(_WORD ^ low)
    sorting |= numbers
    sorting.sort(axis=1)
    sorting &= np.uint64(low)
    return sorting.view(np.int64)


@lru_cache(4)  # windows of an order are nearly all of one size
def _counted(size: int) -> tuple[Keys, Keys]:
    """The numbers below `size`, and the same far apart."""
    numbers = np.arange(size, dtype=np.uint64)
    return numbers, numbers * np.uint64(_GOLDEN)


def permutation(size: int, key: int) -> Integers:
    order: Integers = permutations(size, [key])[0]
    return order


def permuted(number: int, size: int, key: int) -> int:
    """Where one number below `size` goes, without making the whole permutation.

    Rounds of (multiply by an odd number, add, fold the high bits down) are a bijection of the numbers of
    so many bits; an image outside the range is sent round again until it falls inside (cycle walking),
    which takes under two rounds on average.
    """
    bits = max(2, (size - 1).bit_length())
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    while True:
        for turn in range(4):
            number = (number * (key >> 7 * turn | 1) + (key >> 32 + 5 * turn)) & mask
            number ^= number >> half
        if number < size:
            return number


def unpermuted(number: int, size: int, key: int) -> int:
    """The number that `permuted` sends here: its rounds undone, last one first."""
    bits = max(2, (size - 1).bit_length())
    mask, half = (1 << bits) - 1, (bits + 1) // 2
    while True:
        for turn in reversed(range(4)):
            number ^= number >> half
            factor = (key >> 7 * turn | 1) & mask
            number = ((number - (key >> 32 + 5 * turn)) * pow(factor, -1, 1 << bits)) & mask
        if number < size:
            return number
