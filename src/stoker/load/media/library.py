"""Pillow: what the C engine does not take (PNG, WebP, CMYK, 16 bits), and all of it where that was not built.
The home of PIL."""

from __future__ import annotations

import io
from math import ceil, log2
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image as Pictures
from PIL import UnidentifiedImageError

from stoker.load.media.boxes import Crop

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF")  # none that starts another program
_ORIENTATION = 0x0112
_DRAFTED = "RGB", "L"

# What decoders of broken bytes raise: Pillow's own list is not written down anywhere.
BROKEN = (
    UnidentifiedImageError,
    Pictures.DecompressionBombError,
    Pictures.DecompressionBombWarning,
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    IndexError,
    KeyError,
    TypeError,
    AttributeError,
    AssertionError,
    ZeroDivisionError,
    OverflowError,
    RuntimeError,
    NotImplementedError,
    MemoryError,
    UserWarning,
)


def open_picture(data: Any) -> Any:  # a PIL image; of anything that has a buffer
    """Its header only: no pixel is decoded yet."""
    return Pictures.open(io.BytesIO(data), formats=FORMATS)


def size_of(picture: Any) -> tuple[int, int, int]:
    """Width and height as stored, and how it is to be turned."""
    turn = 1
    if picture.format in ("JPEG", "PNG", "WEBP", "TIFF"):
        try:
            turn = int(picture.getexif().get(_ORIENTATION, 1))
        except BROKEN:  # a remark about a picture that is whole
            turn = 1
    width, height = picture.size
    return width, height, turn if 1 <= turn <= 8 else 1


def decode_crop(picture: Any, crop: Crop, *, denominator: int) -> npt.NDArray[np.uint8]:
    """The crop, resized, as it lies in the file: to be turned and mirrored."""
    box, clip = crop.box, crop.clip
    if denominator > 1 and picture.format == "JPEG":
        width, height = picture.size
        picture.draft(picture.mode, (width // denominator, height // denominator))
        # a side that does not divide is rounded up: its last pixel is of less than the others
        by = 2 ** round(log2(max(width / picture.size[0], height / picture.size[1])))
        box = box[0] / by, box[1] / by, box[2] / by, box[3] / by
        right, bottom = ceil(clip[2] / by), ceil(clip[3] / by)
        clip = clip[0] // by, clip[1] // by, min(picture.size[0], right), min(picture.size[1], bottom)
    picture = _colours(picture)
    if clip != (0, 0, *picture.size):
        picture = picture.crop(clip)
        box = box[0] - clip[0], box[1] - clip[1], box[2] - clip[0], box[3] - clip[1]
    width, height = picture.size
    box = max(0.0, box[0]), max(0.0, box[1]), min(float(width), box[2]), min(float(height), box[3])
    if picture.size != (crop.width, crop.height) or box != (0, 0, width, height):
        picture = picture.resize((crop.width, crop.height), Pictures.Resampling.BILINEAR, box=box)
    return np.asarray(picture)


def _colours(picture: Any) -> Any:
    """Red, green and blue of a byte each, without transparency."""
    picture.load()
    if picture.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        grey = np.asarray(picture)
        return Pictures.fromarray((grey.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # else it warns
    return picture if picture.mode == "RGB" else picture.convert("RGB")
