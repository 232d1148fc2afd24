"""Pixels to floats in numpy, for those who load without torch: channels last, as numpy's users have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.load.media.image import Image


def as_asked(batch: Any, columns: dict[str, Image]) -> Any:
    """A batch of arrays with its images as they were asked for."""
    if not isinstance(batch, dict):
        return batch
    made = dict(batch)
    for name, image in columns.items():
        pixels = made.get(name)
        if image.number != "uint8" and isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8:
            floats = pixels.astype(np.float32) / np.float32(255)
            if image.mean_and_std:
                mean, std = (np.array(three, np.float32) for three in image.mean_and_std)
                floats = (floats - mean) / std
            made[name] = floats.astype(image.number)
    return made
