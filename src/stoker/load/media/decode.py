"""Decoding: the bytes of an image to pixels of a crop, in C by parts where that can, else by the library."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import UsageError, require
from stoker.load.media.boxes import Crop, turned
from stoker.native import native

# A box is decoded at a half, a quarter or an eighth while it stays this many times as large as what is made
# of it. Mean difference to the whole size, resized: of noise at 2 times 0.7 levels, at 3 times 0.3 (limit 1).
_ENOUGH = 3.0
_BASELINE = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive: what libjpeg-turbo has fast code for

Pixels = npt.NDArray[np.uint8]
DrawCrop = Callable[[int, int, int], Crop]  # of the width, the height and the turn


class Undecodable(Exception):
    """Bytes that are no whole image; goes no further than the policy for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """How images are decoded, and why so."""

    name: str
    why: str
    jpeg: Any = None  # the C module, which has no types


def choose_engine(wanted: str) -> Engine:
    """What decodes: found out once, when a loader begins."""
    if wanted != "pillow" and (found := _opened()):
        module, path = found
        own = ", with its own Huffman decoder" if module.has_own_huffman() else ""
        why = f"boxes of JPEGs in C{own}, on {os.path.basename(path)}"
        return Engine(name="libjpeg", why=why, jpeg=module)
    if wanted == "libjpeg":
        raise UsageError(
            "there is no libjpeg-turbo for the C engine, or the module was not built",
            hint="install Pillow, or libjpeg62-turbo, and build stoker with libjpeg62-turbo-dev, "
            'or use engine="auto"',
        )
    require("PIL", extra="media")
    why = (
        "it was asked for" if wanted == "pillow" else "the C module was not built, or found no libjpeg-turbo"
    )
    return Engine(name="pillow", why=why)


@cache
def _opened() -> tuple[Any, str] | None:
    """The C module with a libjpeg-turbo in it: Pillow's own where its wheel brings one, or the system's."""
    module = native("load.media._jpeg")
    if module is None:
        return None
    for path in [*_of_pillow(), "libjpeg.so.62", "libjpeg.so.8"]:
        if module.use(path):
            return module, path
    return None


def _of_pillow() -> list[str]:
    found = find_spec("PIL")
    if found is None or not found.submodule_search_locations:
        return []
    beside = os.path.dirname(next(iter(found.submodule_search_locations)))
    return sorted(glob.glob(os.path.join(glob.escape(beside), "[pP]illow.libs", "libjpeg-*.so*")))


class Decoder:
    """Decodes images; any thread may call it. Raises `Undecodable` for bytes that are none."""

    def __init__(self, engine: Engine, *, max_pixels: int) -> None:
        self._engine, self._max_pixels = engine, max_pixels

    def crops(self, data: Any, draws: list[DrawCrop], outs: list[Pixels | None]) -> tuple[list[Pixels], bool]:
        """The crops of one image, into arrays where those are given; and whether the library was asked."""
        header = self._engine.jpeg.header(data) if self._engine.jpeg else None
        if header is not None:
            width, height, channels, bits, kind, turn = header
            if channels in (1, 3) and bits == 8 and kind in _BASELINE and width and height:
                self._check_size(width, height)
                some = [
                    self._in_c(data, width, height, draw(width, height, turn), out)
                    for draw, out in zip(draws, outs, strict=True)
                ]
                return some, False
        return self._by_library(data, draws, outs), True

    def _in_c(self, data: Any, width: int, height: int, crop: Crop, out: Pixels | None) -> Pixels:
        is_plain = crop.turn == 1 and out is not None
        room = out if is_plain else np.empty((crop.height, crop.width, 3), np.uint8)
        assert room is not None
        wrong = self._engine.jpeg.decode(
            data,
            (width, height),
            crop.box,
            crop.clip,
            denominator_of(crop),
            crop.mirrored and is_plain,
            room,
            (crop.width, crop.height),
        )
        if wrong:
            raise Undecodable(wrong)
        return room if is_plain else _laid(room, crop, out)

    def _by_library(self, data: Any, draws: list[DrawCrop], outs: list[Pixels | None]) -> list[Pixels]:
        require("PIL", extra="media")
        from stoker.load.media import library  # the home of PIL

        found = []
        try:
            for draw, out in zip(draws, outs, strict=True):
                picture = library.open_picture(data)
                width, height, turn = library.size_of(picture)
                self._check_size(width, height)
                crop = draw(width, height, turn)
                pixels = library.decode_crop(picture, crop, denominator=denominator_of(crop))
                found.append(_laid(pixels, crop, out))
        except library.BROKEN as error:
            raise Undecodable(str(error) or type(error).__name__) from error
        return found

    def _check_size(self, width: int, height: int) -> None:
        if width * height > self._max_pixels:
            raise Undecodable(
                f"{width:,} x {height:,} pixels are more than max_pixels={self._max_pixels:,}, and no memory "
                "was taken for them"
            )


def denominator_of(crop: Crop) -> int:
    """How far a JPEG may be scaled down before the box is resized."""
    left, top, right, bottom = crop.box
    room = min((right - left) / crop.width, (bottom - top) / crop.height) / _ENOUGH
    return 8 if room >= 8 else 4 if room >= 4 else 2 if room >= 2 else 1


def _laid(pixels: Pixels, crop: Crop, out: Pixels | None) -> Pixels:
    """Pixels of a file as they are to be seen, in their place."""
    pixels = turned(pixels, crop.turn)
    if crop.mirrored:
        pixels = pixels[:, ::-1]
    if out is None:
        return np.ascontiguousarray(pixels)
    out[:] = pixels
    return out
