"""`Image`: what is to be made of the image in each sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from numbers import Integral, Real
from typing import Annotated, Any, Literal

from stoker.errors import UsageError
from stoker.options import check_choices

Three = tuple[float, float, float]

# torchvision's, of values between 0 and 1
_KNOWN: dict[str, tuple[Three, Three]] = {"imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}
_FLOATS = {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}
_MOST_SIZE = 16384
NAME = "image"  # of the column, where one Image is given


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """How images are decoded: which part of them, how large, and as what numbers. The crop and the flip of a
    sample are drawn from the loader's seed, the epoch and the sample: the same on any number of ranks and
    after a resume."""

    size: Annotated[int, "pixels a side of what comes out"] = 224
    crop: Annotated[
        Literal["random", "center", "whole"],
        '"random": a part of random area and aspect, as torchvision\'s RandomResizedCrop; "center": the '
        'shorter side to `resize`, then the middle; "whole": all of it in its own size, for `transform` or '
        "`collate`",
    ] = "random"
    scale: Annotated[tuple[float, float], 'of the area that a "random" crop takes'] = (0.08, 1.0)
    ratio: Annotated[tuple[float, float], 'of width to height of a "random" crop'] = (3 / 4, 4 / 3)
    flip: Annotated[bool, "mirror every other image"] = False
    resize: Annotated[int, 'the shorter side before a "center" crop; 0: 256 for 224, and so on'] = 0
    normalize: Annotated[
        str | tuple[Three, Three],
        '"imagenet", or mean and standard deviation of each channel, of values from 0 to 1; "": none',
    ] = ""
    dtype: Annotated[
        Literal["", "uint8", "float32", "f32", "float16", "f16", "bfloat16", "bf16"],
        'of the pixels; "": uint8, or float32 where they are normalised. Bytes are decoded and copied; '
        "floats are made where they are to be used",
    ] = ""
    mixup: Annotated[float, "alpha of mixup, up to 1: each image with the one before it; 0: none"] = 0.0
    cutmix: Annotated[float, "alpha of cutmix, up to 1; with mixup too, each has every other image"] = 0.0
    member: Annotated[str, 'which member of a sample, such as "jpg"; "": the one that is an image'] = ""
    on_corrupt: Annotated[
        Literal["", "raise", "skip", "replace"],
        'with an image that cannot be decoded. "skip": another sample of its batches stands in; "replace": '
        'it comes black, and `image_ok` is False; "": as the loader\'s',
    ] = ""
    max_pixels: Annotated[int, "an image of more is refused before memory is taken for it"] = 89_478_485
    engine: Annotated[
        Literal["auto", "nvjpeg", "libjpeg", "pillow"],
        '"nvjpeg": JPEGs by the card, the rest as with "libjpeg"; "libjpeg": in C, by parts; "pillow": by '
        'the library; "auto": the card where batches go to one and it is faster (measured at the start), '
        "else the first of the others that is there",
    ] = "auto"

    def __post_init__(self) -> None:
        check_choices(self)
        for name, least, most in (
            ("size", 1, _MOST_SIZE),
            ("resize", 0, 4 * _MOST_SIZE),
            ("max_pixels", 1, 1 << 40),
        ):
            value = getattr(self, name)
            if not isinstance(value, Integral) or isinstance(value, bool) or not least <= int(value) <= most:
                raise UsageError(
                    f"Image({name}={value!r}) cannot work",
                    hint=f"use a whole number from {least} to {most:,}",
                )
        for name, most_of in (("scale", 1.0), ("ratio", 100.0)):
            _check_range(name, getattr(self, name), most_of)
        for name in ("mixup", "cutmix"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) <= 1:
                raise UsageError(f"Image({name}={value!r}) cannot work", hint="use an alpha from 0 to 1")
        if self.crop == "center" and self.shorter < self.size:
            raise UsageError(
                f"Image(resize={self.resize}) is smaller than size={self.size}",
                hint="a crop cannot be larger than what it is cut from: use a larger resize",
            )
        if self.crop == "whole" and self.mixes:
            raise UsageError(
                "images of their own sizes cannot be mixed", hint='use crop="random" or "center"'
            )
        self._check_numbers()

    def _check_numbers(self) -> None:
        mean_and_std = self.mean_and_std
        if self.number == "uint8" and (mean_and_std or self.mixes):
            raise UsageError(
                "normalised or mixed pixels are no bytes",
                hint='leave dtype out, or use dtype="bf16", "f16" or "f32"',
            )
        if mean_and_std and not all(isfinite(one) for three in mean_and_std for one in three):
            raise UsageError(f"Image(normalize={self.normalize!r}) cannot work", hint="use finite numbers")
        if mean_and_std and not all(one > 0 for one in mean_and_std[1]):
            raise UsageError(
                f"Image(normalize={self.normalize!r}) divides by nothing", hint="use deviations above 0"
            )

    @property
    def shorter(self) -> int:
        """What the shorter side becomes before the middle is cut out."""
        return self.resize or round(self.size * 256 / 224)

    @property
    def mixes(self) -> bool:
        return bool(self.mixup or self.cutmix)

    @property
    def number(self) -> str:
        """The type of a pixel's number, as numpy and torch call it."""
        usual = "float32" if self.normalize or self.mixes else "uint8"
        return _FLOATS.get(self.dtype, self.dtype) or usual

    @property
    def mean_and_std(self) -> tuple[Three, Three] | None:
        wanted: Any = self.normalize
        if not wanted:
            return None
        if isinstance(wanted, str):
            if wanted not in _KNOWN:
                raise UsageError(
                    f"Image(normalize={wanted!r}) is unknown",
                    hint='use "imagenet", or ((mean of red, green, blue), (deviations))',
                )
            return _KNOWN[wanted]
        try:
            mean, std = (tuple(float(one) for one in three) for three in wanted)
            if len(mean) != 3 or len(std) != 3:
                raise ValueError
        except (TypeError, ValueError):
            raise UsageError(
                f"Image(normalize={wanted!r}) is no mean and deviation of three channels",
                hint="give ((r, g, b), (r, g, b))",
            ) from None
        return mean, std


def columns_of(images: Image | Mapping[str, Image] | None) -> dict[str, Image]:
    """The columns of a batch that are images, by name."""
    if images is None:
        return {}
    found = {NAME: images} if isinstance(images, Image) else images
    if not isinstance(found, Mapping) or not all(
        isinstance(name, str) and name and isinstance(one, Image) for name, one in found.items()
    ):
        raise UsageError(
            f"image={images!r:.60} is no stoker.Image",
            hint='use image=stoker.Image(size=224), or several by name: {"large": stoker.Image(...), ...}',
        )
    if not found:
        raise UsageError("image={} names no image", hint="leave image= out")
    if len({(one.member, one.on_corrupt, one.max_pixels, one.engine) for one in found.values()}) > 1:
        raise UsageError(
            "several crops of one image are decoded from the same member, in the same way",
            hint="give all of them the same member, on_corrupt, max_pixels and engine",
        )
    if len(found) > 1 and any(one.mixes for one in found.values()):
        raise UsageError(
            "mixup and cutmix have one weight for each sample", hint="use them with one Image, not several"
        )
    return dict(found)


def _check_range(name: str, value: Any, most: float) -> None:
    try:
        low, high = map(float, value)
    except (TypeError, ValueError):
        low, high = 0.0, 0.0
    if not 0 < low <= high <= most:
        raise UsageError(
            f"Image({name}={value!r}) cannot work", hint=f"use two numbers above 0 and up to {most:g}, rising"
        )
