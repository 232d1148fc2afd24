"""Images by Pillow: checked, turned upright, made smaller; every refusal with its reason.

What an image is asked for is decided from its header; it is decoded once, and only as large as needed.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stoker.errors import require
from stoker.prepare.media.recipe import QUALITY, MediaOptions
from stoker.prepare.media.sources.kinds import IMAGES

# What is opened at all: none that runs another program (EPS) or holds a document (PDF, WMF).
_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
_SUFFIXES = {"JPEG": "jpg", "MPO": "jpg", "JPEG2000": "jp2"}
_ENCODERS = {"jpg": "JPEG", "webp": "WEBP", "avif": "AVIF"}  # what anything else is written as is PNG
_ORIENTATION = 0x0112
_TURNED = range(2, 9)
THUMB = 32  # pixels a side: what a perceptual hash looks at
_STORED_AS_LABELS = ("1", "P", "L", "I", "I;16")  # modes of masks

Thumb = npt.NDArray[np.uint8]


class BadImageError(Exception):
    """Why an image is not taken: a word, and a sentence."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class UnwantedImageError(BadImageError):
    """A sound image that a filter leaves out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """An image as it goes into a sample."""

    data: bytes
    suffix: str
    width: int
    height: int
    changes: tuple[str, ...] = ()
    thumb: Thumb | None = None


def engine() -> str:
    """What decodes and encodes, with its versions: they decide about bytes."""
    pillow = require("PIL", extra="media")
    features = require("PIL.features", extra="media")
    return f"pillow {pillow.__version__}, jpeg {features.version('jpg')}, webp {features.version('webp')}"


class Darkroom:
    """Makes images. `thumbs` are for perceptual hashes."""

    def __init__(self, options: MediaOptions, *, thumbs: bool) -> None:
        self._options, self._thumbs = options, thumbs
        self._image: Any = require("PIL.Image", extra="media")
        self._image.init()
        self._formats = [name for name in _FORMATS if name in self._image.OPEN]  # AVIF is not everywhere
        self._ops: Any = require("PIL.ImageOps", extra="media")
        self._sampling: Any = require("PIL.JpegImagePlugin", extra="media").get_sampling

    def make(self, data: bytes, *, among: int = 1) -> Made:
        """One image of a sample that holds so many; a bad or unwanted one raises."""
        _check_webp(data, self._options.max_pixels)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's opinions on metadata; sizes are checked here
                with self._open(data) as image:
                    return self._made(data, image, among)
        except BadImageError:
            raise
        # a parser of bytes that may be anybody's: whatever it stumbles over, they are no image
        except Exception as error:
            raise BadImageError("damaged", f"{type(error).__name__}: {error}"[:200]) from error

    def _open(self, data: bytes) -> Any:
        try:
            return self._image.open(io.BytesIO(data), formats=self._formats)
        except self._image.DecompressionBombError as error:
            raise BadImageError("too_many_pixels", str(error)) from error
        except self._image.UnidentifiedImageError as error:
            raise BadImageError("not_an_image", f"it begins with {data[:12]!r}") from error

    def _made(self, data: bytes, image: Any, among: int) -> Made:
        options, suffix = self._options, _suffix(image.format)
        _check_pixels(image.width, image.height, options.max_pixels)
        orientation = image.getexif().get(_ORIENTATION, 1)
        is_turned = orientation in _TURNED
        width, height = image.size[::-1] if is_turned and orientation > 4 else image.size
        _check_wanted(width, height, options)
        size = target_size(width, height, options)
        changes = ["turned"] * is_turned + ["resized"] * (size != (width, height))
        if not changes and not (options.jpeg_quality and suffix == "jpg"):
            return Made(data=data, suffix=suffix, width=width, height=height, thumb=self._checked(image))
        if getattr(image, "is_animated", False) and image.format != "MPO":
            told = ("animated: left as it is",)
            thumb = self._checked(image)
            return Made(data=data, suffix=suffix, width=width, height=height, changes=told, thumb=thumb)
        return self._changed(data, image, size, changes, among)

    def _checked(self, image: Any) -> Thumb | None:
        """Decode what is kept as it is, to see that it can be: a JPEG at an eighth of its size, which reads
        every byte of it too."""
        if self._options.check == "header" and not self._thumbs:
            return None
        if image.mode in ("RGB", "L"):
            image.draft("L", (max(THUMB * 2, image.width // 8), max(THUMB * 2, image.height // 8)))
        image.load()
        return self._thumb(image)

    def _thumb(self, image: Any) -> Thumb | None:
        if not self._thumbs:
            return None
        plain = image.convert("RGBA") if image.mode in ("P", "PA") else image
        grey = plain.convert("L").resize((THUMB, THUMB), self._image.Resampling.BOX)
        return np.asarray(grey, np.uint8)

    def _changed(
        self, data: bytes, image: Any, size: tuple[int, int], changes: list[str], among: int
    ) -> Made:
        suffix, how = _suffix(image.format), self._as_it_was(image, changes)
        if max(size) * 2 < max(image.size):
            # Pillow averages in the DCT: twice the size leaves the resampling filter its work
            image.draft(image.mode, (2 * max(size), 2 * max(size)))
        image.load()
        upright = self._ops.exif_transpose(image) if "turned" in changes else image
        final = upright if upright.size == size else self._resized(upright, size, among)
        made, ends = self._encoded(final, suffix, {**how, **_extra(upright)})
        thumb = self._thumb(final)
        if not changes and len(made) >= len(data):  # encoded anew for its size alone
            return Made(data=data, suffix=suffix, width=size[0], height=size[1], thumb=thumb)
        told = tuple(changes or ["encoded anew"])
        return Made(data=made, suffix=ends, width=size[0], height=size[1], changes=told, thumb=thumb)

    def _as_it_was(self, image: Any, changes: list[str]) -> dict[str, Any]:
        """How a JPEG was encoded. Turned with its own tables it loses next to nothing."""
        if image.format not in ("JPEG", "MPO"):
            return {}
        found = self._sampling(image)
        how: dict[str, Any] = {} if found < 0 else {"subsampling": found}
        if changes == ["turned"] and not self._options.jpeg_quality:
            how["qtables"] = dict(image.quantization)
        return how

    def _resized(self, image: Any, size: tuple[int, int], among: int) -> Any:
        resampling = self._image.Resampling
        if among > 1 and image.mode in _STORED_AS_LABELS and image.format != "JPEG":
            return image.resize(
                size, resampling.NEAREST
            )  # a mask beside an image: no class between two others
        if image.mode in ("1", "P", "PA"):
            has_alpha = "transparency" in image.info or image.mode == "PA"
            image = image.convert("L" if image.mode == "1" else "RGBA" if has_alpha else "RGB")
        return image.resize(size, resampling.LANCZOS)

    def _encoded(self, image: Any, suffix: str, how: dict[str, Any]) -> tuple[bytes, str]:
        encoder = _ENCODERS.get(suffix, "PNG")
        options = dict(how)
        if encoder != "PNG" and "qtables" not in options:
            options["quality"] = self._options.jpeg_quality or QUALITY
        out = io.BytesIO()
        try:
            image.save(out, encoder, **options)
        except ValueError:  # metadata that does not fit where it came from
            out = io.BytesIO()
            options.pop("exif", None)
            image.save(out, encoder, **options)
        return out.getvalue(), suffix if encoder != "PNG" else "png"


def target_size(width: int, height: int, options: MediaOptions) -> tuple[int, int]:
    """The size after the asked bounds: never larger than it was, no side of nothing."""
    side, wanted = (
        (max(width, height), options.longest_side)
        if options.longest_side
        else (min(width, height), options.shortest_side)
    )
    if not wanted or side <= wanted:
        return width, height
    return max(1, round(width * wanted / side)), max(1, round(height * wanted / side))


def _check_pixels(width: int, height: int, most: int) -> None:
    if width * height > most:
        raise BadImageError(
            "too_many_pixels", f"{width:,} x {height:,} are {width * height:,} pixels; the limit is {most:,}"
        )


def _check_webp(data: bytes, most: int) -> None:
    """Pillow reserves the canvas of a WebP when it opens it: look at the header first."""
    if data[8:16] == b"WEBPVP8X" and len(data) >= 30:
        width, height = [int.from_bytes(data[at : at + 3], "little") + 1 for at in (24, 27)]
        _check_pixels(width, height, most)


def _check_wanted(width: int, height: int, options: MediaOptions) -> None:
    short, long = sorted((width, height))
    if short < options.min_side:
        raise UnwantedImageError("too_small", f"{width:,} x {height:,}")
    if options.max_aspect and long > short * options.max_aspect:
        raise UnwantedImageError("too_long_and_thin", f"{width:,} x {height:,}")


def _suffix(name: str) -> str:
    found = _SUFFIXES.get(name, name.lower())
    return IMAGES.get(found, found)


def _extra(image: Any) -> dict[str, Any]:
    """What goes along with the pixels: the colour profile, and the metadata but for the orientation."""
    extra = {"icc_profile": image.info["icc_profile"]} if image.info.get("icc_profile") else {}
    try:
        exif = image.getexif()
        exif.pop(_ORIENTATION, None)
        data = exif.tobytes() if len(exif) else b""
    except Exception:  # metadata may be damaged where pixels are not
        data = b""
    return {**extra, "exif": data} if data else extra
