"""Mixup and cutmix: how much of an image is another one's, drawn from numbers that the order gives.

The numbers go along with a batch and are used where its pixels become floats (`device/pixels.py`). An image
is mixed with the one before it in its batch, the first with the last; so who it is mixed with depends on the
batch, the weight and the box do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.load.media.boxes import uniforms
from stoker.load.media.image import Image
from stoker.mixing import Keys

WEIGHT, BOX, OTHER = "lam", "cut", "cls_mixed"
_TRIES = 16  # of a pair, for Johnk's way to draw a beta: up to an alpha of 1 half of them fit


def mix_columns(columns: dict[str, Image], keys: Keys) -> dict[str, Any]:
    """The weight of each image in itself, and the box of it that another one takes."""
    image = next(iter(columns.values()))
    if not image.mixes:
        return {}
    numbers = uniforms(keys, 2 * _TRIES + 3)
    which, left, top = numbers[:, -1], numbers[:, -3], numbers[:, -2]
    is_cut = which < 0.5 if image.mixup and image.cutmix else np.full(len(keys), bool(image.cutmix))
    weight = np.where(is_cut, _beta(image.cutmix or 1.0, numbers), _beta(image.mixup or 1.0, numbers))
    side = np.sqrt(1 - weight) * image.size
    low = np.stack([top, left], 1) * image.size - side[:, None] / 2
    box = np.concatenate([low, low + side[:, None]], 1).round().clip(0, image.size)
    box[~is_cut] = 0
    area = (box[:, 2] - box[:, 0]) * (box[:, 3] - box[:, 1]) / image.size**2
    return {
        WEIGHT: np.where(is_cut, 1 - area, weight).astype(np.float32),
        BOX: box.astype(np.int64),
    }


def _beta(alpha: float, numbers: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """For each row one draw of Beta(alpha, alpha): the first pair that fits. In logarithms: a power of
    1 / alpha leaves nothing of most numbers where alpha is small."""
    powers = np.log(np.maximum(numbers[:, : 2 * _TRIES], 2.0**-54)) / alpha
    one, other = powers[:, :_TRIES], powers[:, _TRIES:]
    both = np.logaddexp(one, other)
    fits = both <= 0
    first, rows = fits.argmax(1), np.arange(len(numbers))
    share: npt.NDArray[np.float64] = np.exp(one[rows, first] - both[rows, first])
    return np.where(fits.any(1), share, 0.5)
