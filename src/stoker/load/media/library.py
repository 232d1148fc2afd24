"""Pillow: what the C engine does not take (PNG, WebP, CMYK, 16 bits), and all of it where that was not built.
The home of PIL."""

from __future__ import annotations

import io
from math import ceil, log2
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image as Pictures
from PIL import UnidentifiedImageError

from stoker.load.media.boxes import Crop

FORMATS = (
    "JPEG",
    "PNG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "AVIF",
    "JPEG2000",
)  # none that starts another program
_OF_16_BITS = ("PNG", "PPM")  # which older Pillows open as if of 32
_ORIENTATION, _SHORT = 0x0112, 3

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
    try:
        return Pictures.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:  # whose message is of a buffer's address
        raise UnidentifiedImageError(f"no known image begins with {bytes(data[:12])!r}") from None


def size_of(picture: Any) -> tuple[int, int, int]:
    """Width and height as stored, and how it is to be turned."""
    width, height = picture.size
    found = picture.info.get("exif", b"")
    return width, height, orientation_in(found) if isinstance(found, bytes) else 1


def orientation_in(exif: bytes) -> int:
    """How an image is to be turned, from 1 to 8, as the first directory of its EXIF says. Read here as in C:
    Pillow's own reader warns of odd ones, and pictures that are whole would come as broken."""
    tiff = exif.removeprefix(b"Exif\0\0")
    if len(tiff) < 8 or tiff[:4] not in (b"II*\0", b"MM\0*"):
        return 1
    order: Literal["little", "big"] = "little" if tiff[:1] == b"I" else "big"

    def number(at: int, size: int) -> int:
        return int.from_bytes(tiff[at : at + size], order)

    first = number(4, 4)
    for at in range(first + 2, min(first + 2 + 12 * number(first, 2), len(tiff) - 11), 12):
        if (number(at, 2), number(at + 2, 2), number(at + 4, 4)) == (_ORIENTATION, _SHORT, 1):
            return number(at + 8, 2) if 1 <= number(at + 8, 2) <= 8 else 1
    return 1


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
    if picture.mode == "F" or (picture.mode == "I" and picture.format not in _OF_16_BITS):
        raise ValueError(
            f"its pixels are numbers of 32 bits ({picture.format}, mode {picture.mode}), and nothing says "
            "which of them is white: make bytes of them beforehand"
        )
    if picture.mode.startswith("I"):  # 16 bits, which Pillow would cut off at 255
        grey = np.asarray(picture)
        return Pictures.fromarray((grey.astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode == "P" and "transparency" in picture.info:
        picture = picture.convert("RGBA")  # else it warns
    return picture if picture.mode == "RGB" else picture.convert("RGB")


def resized(pixels: npt.NDArray[np.uint8], crop: Crop) -> npt.NDArray[np.uint8]:
    """The crop of pixels that something else has decoded."""
    return decode_crop(Pictures.fromarray(pixels), crop, denominator=1)
