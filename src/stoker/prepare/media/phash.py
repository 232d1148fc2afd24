"""Perceptual hash (pHash): 64 bits that a copy of an image, scaled or encoded again, nearly shares.

64 low frequencies of the cosine transform of 32 by 32 grey pixels, each above or below their median.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_SIDE = 8  # frequencies a side: 64 bits
_AT_ONCE = 1024


def hashes(thumbs: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    """The perceptual hash of each thumb."""
    cosines = _cosines(thumbs.shape[1])
    found = [np.zeros(0, np.uint64)]
    for start in range(0, len(thumbs), _AT_ONCE):
        pixels = thumbs[start : start + _AT_ONCE].astype(np.float32)
        low = np.einsum("ij,njk,lk->nil", cosines, pixels, cosines, optimize=True).reshape(-1, _SIDE * _SIDE)
        bits = low > np.median(low, axis=1, keepdims=True)
        found.append(np.packbits(bits, axis=1).view(">u8").ravel().astype(np.uint64))
    return np.concatenate(found)


def _cosines(side: int) -> npt.NDArray[np.float32]:
    place, frequency = np.arange(side) + 0.5, np.arange(_SIDE)[:, None]
    return np.cos(np.pi * frequency * place / side).astype(np.float32)
