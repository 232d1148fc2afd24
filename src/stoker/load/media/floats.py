"""Pixels to floats in numpy, for those who load without torch: channels last, as numpy's users have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from stoker.load.media.image import Image
from stoker.load.media.images import IS_OK, LABEL, check_label, check_left_alone
from stoker.load.media.mixing import BOX, OTHER, WEIGHT


def as_asked(batch: Any, columns: dict[str, Image]) -> Any:
    """A batch of arrays with its images as they were asked for."""
    if not isinstance(batch, dict):
        return batch
    made = dict(batch)
    for name, image in columns.items():
        pixels = made.get(name)
        if isinstance(pixels, list) and image.crop == "whole":
            made[name] = [_floats(name, one, image) for one in pixels]
            continue
        made[name] = _floats(name, pixels, image)
        if image.mixes:
            made[name] = _mixed(made[name], made)
    return _with_others(made)


def _floats(name: str, pixels: Any, image: Image) -> Any:
    if image.number == "uint8" or not _is_bytes(pixels):
        check_left_alone(name, image, pixels)
        return pixels
    floats = pixels.astype(np.float32) / np.float32(255)
    if image.mean_and_std:
        mean, std = (np.array(three, np.float32) for three in image.mean_and_std)
        floats = (floats - mean) / std
    return floats.astype(image.number)


def _is_bytes(pixels: Any) -> bool:
    return isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.shape[-1] == 3


def _mixed(pixels: Any, batch: dict[str, Any]) -> Any:
    """Each image with the one before it: by its weight, or where its box lies."""
    other, box = np.roll(pixels, 1, 0), batch[BOX]
    rows, across = np.arange(pixels.shape[1])[:, None], np.arange(pixels.shape[2])[None]
    top, left, bottom, right = (box[:, n, None, None] for n in range(4))
    is_other = ((rows >= top) & (rows < bottom) & (across >= left) & (across < right))[..., None]
    is_cut = (box[:, 2] > box[:, 0])[:, None, None, None]
    weight = batch[WEIGHT][:, None, None, None]
    blended = (pixels * weight + other * (1 - weight)).astype(pixels.dtype)
    return np.where(is_cut, np.where(is_other, other, pixels), blended)


def _with_others(batch: dict[str, Any]) -> dict[str, Any]:
    """The label of what each image was mixed with; the box has been used."""
    if BOX not in batch:
        return batch
    check_label(batch.get(LABEL), np.ndarray)
    if IS_OK in batch:
        batch[IS_OK] = batch[IS_OK] & np.roll(batch[IS_OK], 1, 0)
    rest = {name: one for name, one in batch.items() if name != BOX}
    return {**rest, OTHER: np.roll(batch[LABEL], 1, 0)}
