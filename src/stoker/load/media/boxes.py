"""Crops: which part of an image becomes its sample, drawn from numbers that the order gives. Pure.

As torchvision's RandomResizedCrop, Resize and CenterCrop do it, so that a recipe gives what it gave there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import numpy.typing as npt

from stoker.load.media.image import Image
from stoker.mixing import Integers, Keys, key_of, mixed

_TRIES = 10  # until a box of the drawn area and aspect lies in the image, as torchvision's
_FLIP = 4 * _TRIES
DRAWN = _FLIP + 1  # numbers that a crop takes

# Orientations that lie on their side, and those whose columns or rows run backwards.
SWAPPED, REVERSED_ACROSS, REVERSED_DOWN = (5, 6, 7, 8), (2, 3, 7, 8), (3, 4, 6, 7)


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A box of an image as it is stored, and what to make of it. Nothing outside of `clip` is looked at."""

    box: tuple[float, float, float, float]  # left, top, right, bottom
    clip: tuple[int, int, int, int]
    width: int  # of what comes out, before it is turned
    height: int
    mirrored: bool
    turn: int = 1  # EXIF's orientation, from 1 to 8


def keys_of(*, seed: int, epochs: Integers, datasets: Integers, samples: Integers, what: int) -> Keys:
    """One key for each sample of an epoch: nothing of who asks for it, or when, goes in."""
    keys = mixed(epochs.astype(np.uint64) ^ np.uint64(key_of(seed, what)))
    keys = mixed(keys ^ datasets.astype(np.uint64))
    return mixed(keys ^ samples.astype(np.uint64))


def uniforms(keys: Keys, count: int) -> npt.NDArray[np.float64]:
    """For each key, so many numbers from 0 up to 1, as rows."""
    steps = mixed(np.arange(1, count + 1, dtype=np.uint64))
    found: npt.NDArray[np.float64] = (mixed(keys[:, None] ^ steps) >> np.uint64(11)) * 2.0**-53
    return found


def crop_of(image: Image, width: int, height: int, numbers: Sequence[float], *, turn: int = 1) -> Crop:
    """What to make of an image that is stored with this width and height, and is to be turned so."""
    seen = (height, width) if turn in SWAPPED else (width, height)
    clip = _random(image, *seen, numbers) if image.crop == "random" else (0, 0, *seen)
    box = _middle(image, *seen) if image.crop == "center" else clip
    size = seen if image.crop == "whole" else (image.size, image.size)
    mirrored = image.flip and numbers[_FLIP] < 0.5
    if turn == 1:
        return Crop(box=box, clip=clip, width=size[0], height=size[1], mirrored=mirrored)
    out = (size[1], size[0]) if turn in SWAPPED else size
    left, top, right, bottom = _as_stored(clip, width, height, turn)
    return Crop(
        box=_as_stored(box, width, height, turn),
        clip=(round(left), round(top), round(right), round(bottom)),
        width=out[0],
        height=out[1],
        mirrored=mirrored,
        turn=turn,
    )


def _random(image: Image, width: int, height: int, numbers: Sequence[float]) -> tuple[int, int, int, int]:
    """A part of random area and aspect; the middle, as much of it as the aspects allow, where none fits."""
    (least, most), (narrow, broad) = image.scale, image.ratio
    for at in range(0, _FLIP, 4):
        area = width * height * (least + (most - least) * numbers[at])
        aspect = exp(log(narrow) + (log(broad) - log(narrow)) * numbers[at + 1])
        wide, high = round(sqrt(area * aspect)), round(sqrt(area / aspect))
        if 0 < wide <= width and 0 < high <= height:
            left = int((width - wide + 1) * numbers[at + 2])
            top = int((height - high + 1) * numbers[at + 3])
            return left, top, left + wide, top + high
    wide, high = width, height
    if width < narrow * height:
        high = max(1, round(width / narrow))
    elif width > broad * height:
        wide = max(1, round(height * broad))
    left, top = (width - wide) // 2, (height - high) // 2
    return left, top, left + wide, top + high


def _middle(image: Image, width: int, height: int) -> tuple[float, float, float, float]:
    """Where the middle lies that would be cut out of the whole, resized: the whole is never made."""
    short = min(width, height)
    # whole pixels, as Resize makes them: the other side is cut down to one
    across, down = (int(image.shorter * side / short) for side in (width, height))
    left, top = round((across - image.size) / 2), round((down - image.size) / 2)
    return (
        left * width / across,
        top * height / down,
        min(float(width), (left + image.size) * width / across),
        min(float(height), (top + image.size) * height / down),
    )


def _as_stored(
    box: tuple[float, float, float, float], width: int, height: int, turn: int
) -> tuple[float, float, float, float]:
    """A box of the image as it is seen, in the image as it is stored, of this width and height."""
    left, top, right, bottom = box
    if turn in SWAPPED:
        left, top, right, bottom = top, left, bottom, right  # 5: turned over its diagonal
    if turn in REVERSED_ACROSS:
        left, right = width - right, width - left
    if turn in REVERSED_DOWN:
        top, bottom = height - bottom, height - top
    return left, top, right, bottom


def turned(pixels: npt.NDArray[np.uint8], turn: int) -> npt.NDArray[np.uint8]:
    """Pixels as they are stored, as they are to be seen."""
    if turn in REVERSED_ACROSS:
        pixels = pixels[:, ::-1]
    if turn in REVERSED_DOWN:
        pixels = pixels[::-1]
    return pixels.transpose(1, 0, 2) if turn in SWAPPED else pixels
